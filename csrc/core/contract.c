/* contract.c - what this build of the core takes structs, tables and numbers to be.
 *
 * Compiled once and linked into the extension and the CUDA library. XT_CONTRACT is for this file alone (setup_cuda.py makes it), so
 * that a changed header makes no object anew that does not include it.
 */
#include "xtrain.h"

const char *xt_contract(void) { return XT_CONTRACT; }
