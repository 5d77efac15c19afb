/* random.c - the process-wide generator: a seed, and a stream number that grows by one with every fill. */
#include "xtrain.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void renew_lock(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    lock = fresh;
}
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(NULL, NULL, renew_lock); }

static XtPhilox state = {.seed = 0x5EED5EED5EEDull, .stream = 0};

void xt_manual_seed(uint64_t seed) { xt_random_set_state(seed, 0); }

XtPhilox xt_random_next(void) {
    pthread_mutex_lock(&lock);
    XtPhilox now = state;
    state.stream++;
    pthread_mutex_unlock(&lock);
    return now;
}

void xt_random_get_state(uint64_t *seed, uint64_t *stream) {
    pthread_mutex_lock(&lock);
    *seed = state.seed;
    *stream = state.stream;
    pthread_mutex_unlock(&lock);
}

void xt_random_set_state(uint64_t seed, uint64_t stream) {
    pthread_mutex_lock(&lock);
    state = (XtPhilox){seed, stream};
    pthread_mutex_unlock(&lock);
}
