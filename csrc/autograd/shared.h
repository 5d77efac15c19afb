/* shared.h - what keeps several threads on one graph apart: the tape's lock, and who is adding to a .grad.
 *
 * The lock guards the fields that tape.h names. A thread holds it for a few loads and stores, whether it has the GIL or not, and takes no
 * other lock meanwhile.
 *
 * Adding to a .grad takes a kernel, longer than the lock may be held. So a walk puts its thread into XtGrad.adder for that time. Another
 * walk that comes to the end waits until it is gone; one that only could have spared a pass (xt_node_accumulator) does without. The
 * holder runs one kernel and no Python code but signal handlers, and holds at most the .grads of one rule, for none of which it waits: no
 * deadlock. A user's thread does not ask: it may take or replace .grad at any time, and then the sum goes with what it replaced, as if
 * the addition had come first.
 */
#pragma once

#include "tape.h"

#include <pthread.h>

extern pthread_mutex_t xt_tape_mutex;
extern pthread_cond_t xt_tape_added; /* with the lock: somebody's addition has ended */
static inline void xt_tape_lock(void) { pthread_mutex_lock(&xt_tape_mutex); }
static inline void xt_tape_unlock(void) { pthread_mutex_unlock(&xt_tape_mutex); }

/* This thread in this process, never 0: after a fork no number of the parent is anybody's. */
uint64_t xt_tape_me(void);
/* Whether another thread of this process is adding. The same thread may come twice: one tensor can be two inputs of a rule. */
bool xt_tape_taken(uint64_t adder);
