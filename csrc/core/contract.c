/* contract.c - the version and source hash by which the extension and the CUDA library know that they share their structs.
 *
 * Compiled once and linked into both. Only this file is compiled with XT_CONTRACT (made by setup_cuda.py): an edited header
 * recompiles the files that include it and this one.
 */
#include "xtrain.h"

const char *xt_contract(void) { return XT_CONTRACT; }
