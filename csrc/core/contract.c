/* contract.c - the version and a hash of the shared sources. Equal contracts mean that extension and CUDA library have the same structs.
 *
 * Only this file gets the hash (XT_CONTRACT, from setup_cuda.py), so an edited header recompiles only its includers and this file. It
 * is compiled once and linked into both libraries.
 */
#include "xtrain.h"

const char *xt_contract(void) { return XT_CONTRACT; }
