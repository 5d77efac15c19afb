/* threads.c - a small pool that runs the fixed pieces of a loop.
 *
 * Why not OpenMP: its runtime hangs in a forked child once the parent has used it, brings a second copy of itself into every
 * process, and ignores Ctrl-C. This pool is small, survives fork, and asks for interrupts between pieces.
 *
 * A job is published under a lock. Workers spin a little for the next one (a training step is thousands of short loops), and then
 * sleep. A caller that waits for the last pieces of its workers spins, then yields, and then sleeps. Pieces are claimed from an atomic
 * counter: a piece may run on any thread, but always computes the same.
 */
#define _GNU_SOURCE /* sched_getaffinity, sched_getcpu */
#include "xtrain.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define SPINS 4000       /* about 20 us of polling */
#define PATIENCE 100000  /* ns that a caller yields after that, before it sleeps: a wake-up costs it 20 to 50 us */
#define ASLEEP (1 << 30) /* a bit of Job.running */

bool (*xt_interrupt_check)(void);

typedef struct Job {
    XtBody body;
    void *context;
    int64_t count, grain, pieces;
    int64_t next;      /* atomic: first piece nobody has claimed */
    int running;       /* atomic: workers inside this job, and ASLEEP while its caller sleeps until they have left */
    int stop;          /* atomic: an error or Ctrl-C: claim no more */
    int pause;         /* atomic: the caller is about to fork: workers leave after their piece */
    int workers;       /* how many may join in all */
    int limit;         /* of those, how many may still join, under lock */
    XtStatus status;   /* first error, under lock */
    char message[512]; /* its text: the worker's own buffer is not the caller's */
} Job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER; /* held by the thread whose job the pool runs */
/* Workers wait for a job, and its caller for them to leave. */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static Job *current;                   /* under lock */
static uint64_t generation;            /* atomic: number of jobs published */
static int workers;                    /* started, under one_job */
static pthread_t handles[MAX_THREADS]; /* of the workers, under one_job */
static int wanted_threads;             /* 0: not decided yet */
static _Thread_local bool inside;
static _Thread_local Job *own_job; /* the one that this thread has given to the pool */

/* Does the next piece that nobody has claimed; false where there is none. */
static bool run_piece(Job *job, XtStatus *status) {
    int64_t piece = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    if (piece >= job->pieces) return false;
    int64_t begin = piece * job->grain, end = begin + job->grain;
    *status = job->body(job->context, begin, end < job->count ? end : job->count);
    return true;
}

static void run_pieces(Job *job) {
    XtStatus status;
    while (!__atomic_load_n(&job->stop, __ATOMIC_RELAXED) && !__atomic_load_n(&job->pause, __ATOMIC_RELAXED)) {
        if (!run_piece(job, &status)) return;
        if (status == XT_OK) continue;
        pthread_mutex_lock(&lock);
        if (job->status == XT_OK) {
            job->status = status;
            strncpy(job->message, xt_error_message(), sizeof job->message - 1);
        }
        pthread_mutex_unlock(&lock);
        __atomic_store_n(&job->stop, 1, __ATOMIC_RELAXED);
    }
}

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    sched_yield();
#endif
}

/* Wakes the caller that sleeps in `withdraw`. It sets ASLEEP and begins to wait under the lock, so it cannot miss the signal: here it
 * waits, or has already seen that all workers have left. In that case a later caller may get the signal; its loop looks again. */
static void wake_caller(void) {
    pthread_mutex_lock(&lock);
    pthread_cond_signal(&left);
    pthread_mutex_unlock(&lock);
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void *worker(void *unused) {
    (void)unused;
    inside = true; /* a kernel that calls xt_parallel from a piece runs it right there */
    uint64_t seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && __atomic_load_n(&generation, __ATOMIC_ACQUIRE) == seen; i++) pause_cpu();
        pthread_mutex_lock(&lock);
        while (generation == seen) pthread_cond_wait(&wake, &lock);
        seen = generation;
        Job *job = current;
        if (job && job->limit > 0) job->limit--, __atomic_add_fetch(&job->running, 1, __ATOMIC_RELAXED);
        else job = NULL;
        pthread_mutex_unlock(&lock);
        if (!job) continue;
        run_pieces(job);
        /* The last access: the job lies on its caller's stack. */
        if (__atomic_sub_fetch(&job->running, 1, __ATOMIC_RELEASE) == ASLEEP) wake_caller();
    }
    return NULL;
}

static void publish(Job *job) {
    pthread_mutex_lock(&lock);
    job->limit = job->workers;
    current = job;
    __atomic_add_fetch(&generation, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
}

/* No worker joins from here on; returns when the last one has left. */
static void withdraw(Job *job) {
    pthread_mutex_lock(&lock);
    current = NULL;
    pthread_mutex_unlock(&lock);
    int64_t begun = 0; /* when yielding began. A time ends it, not a count: on a busy core one yield may take milliseconds */
    for (int i = 0; i <= SPINS || nanoseconds() - begun < PATIENCE; i++) {
        if (__atomic_load_n(&job->running, __ATOMIC_ACQUIRE) == 0) return;
        if (i < SPINS) pause_cpu();
        else if (i == SPINS) begun = nanoseconds();
        else sched_yield();
    }
    pthread_mutex_lock(&lock);
    __atomic_or_fetch(&job->running, ASLEEP, __ATOMIC_RELAXED);
    while (__atomic_load_n(&job->running, __ATOMIC_ACQUIRE) != ASLEEP) pthread_cond_wait(&left, &lock);
    __atomic_store_n(&job->running, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&lock);
}

/* A fork in the middle of this thread's own job: a signal handler of Python runs between two pieces and forks. The child has no
 * workers, and a piece that one of them had begun would never be finished, nor begun again. So they finish what they have first (they
 * need no lock for that but `lock`, which nobody keeps); the child then does the remaining pieces by itself. */
static void pause_own_job(void) {
    if (!own_job) return;
    __atomic_store_n(&own_job->pause, 1, __ATOMIC_RELAXED);
    withdraw(own_job);
}
static void resume_own_job(void) {
    if (!own_job) return;
    __atomic_store_n(&own_job->pause, 0, __ATOMIC_RELAXED);
    publish(own_job);
}

/* After a fork only the calling thread exists: the pool starts over. */
static void forget_workers(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t fresh_condition = PTHREAD_COND_INITIALIZER;
    lock = fresh;
    one_job = fresh;
    wake = fresh_condition;
    left = fresh_condition;
    workers = 0;
    current = NULL;
    if (!own_job) return;
    __atomic_store_n(&own_job->pause, 0, __ATOMIC_RELAXED);
    pthread_mutex_lock(&one_job); /* the pool is still this thread's */
}
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(pause_own_job, resume_own_job, forget_workers); }

static int cores_available(void) {
#ifdef CPU_COUNT
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

int xt_num_threads(void) {
    int count = __atomic_load_n(&wanted_threads, __ATOMIC_RELAXED);
    if (count) return count;
    const char *text = getenv("XTRAIN_NUM_THREADS");
    if (!text) text = getenv("OMP_NUM_THREADS");
    count = text ? atoi(text) : 0;
    if (count < 1) count = cores_available();
    if (count > MAX_THREADS) count = MAX_THREADS;
    __atomic_store_n(&wanted_threads, count, __ATOMIC_RELAXED);
    return count;
}

XtStatus xt_set_num_threads(int count) {
    if (count < 1 || count > MAX_THREADS)
        return xt_error(XT_VALUE_ERROR, "set_num_threads: count must be in [1, %d], got %d", MAX_THREADS, count);
    __atomic_store_n(&wanted_threads, count, __ATOMIC_RELAXED);
    return XT_OK;
}

static void start_workers(int count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (workers < count) {
        if (pthread_create(&handles[workers], &attributes, worker, NULL)) break; /* fewer threads: slower, not wrong */
        workers++;
    }
    pthread_attr_destroy(&attributes);
}

bool xt_interrupted(void) {
    static _Thread_local struct timespec last;
    bool (*check)(void) = __atomic_load_n(&xt_interrupt_check, __ATOMIC_RELAXED); /* once: it becomes NULL when Python ends */
    if (!check) return false;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t ms = (int64_t)(now.tv_sec - last.tv_sec) * 1000 + (now.tv_nsec - last.tv_nsec) / 1000000;
    if (ms < 50) return false;
    last = now;
    return check();
}

/* Linux tends to start a woken thread on its waker's CPU, where it waits for the waker: after a pause the first 100 ms of work
 * would run on one core. So workers may run on every CPU but the caller's. This costs a vDSO call unless the caller has moved. */
static void keep_off_my_cpu(void) {
#ifdef __linux__
    static int avoided = -1, known; /* under one_job: the CPU, and how many workers have been told */
    int cpu = sched_getcpu();
    if ((cpu == avoided && known == workers) || cpu < 0) return;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) < 2) return;
    CPU_CLR((size_t)cpu, &set);
    for (int i = 0; i < workers; i++) pthread_setaffinity_np(handles[i], sizeof set, &set);
    avoided = cpu;
    known = workers;
#endif
}

/* One piece after the other in this thread: for short loops, nested calls, and when the pool is busy with another caller's job. */
static XtStatus run_here(int64_t count, int64_t grain, XtBody body, void *context, bool may_ask) {
    for (int64_t begin = 0; begin < count; begin += grain) {
        int64_t end = grain < count - begin ? begin + grain : count;
        XT_CHECK(body(context, begin, end));
        if (may_ask && end < count && xt_interrupted()) return XT_INTERRUPTED;
    }
    return XT_OK;
}

XtStatus xt_parallel(int64_t count, int64_t grain, XtBody body, void *context) {
    if (!body) return xt_error(XT_TYPE_ERROR, "its tensors must have a floating point dtype; no kernel exists for another");
    if (count <= 0) return XT_OK;
    if (grain < 1) grain = 1;
    int64_t pieces = (count - 1) / grain + 1;
    int threads = inside || pieces == 1 ? 1 : xt_num_threads();
    if (threads > pieces) threads = (int)pieces;
    if (threads <= 1 || pthread_mutex_trylock(&one_job) != 0) return run_here(count, grain, body, context, !inside);

    if (workers < threads - 1) start_workers(threads - 1);
    keep_off_my_cpu();
    Job job = {.body = body, .context = context, .count = count, .grain = grain, .pieces = pieces, .workers = threads - 1};
    publish(&job);

    own_job = &job;
    inside = true;
    XtStatus own = XT_OK;
    while (!__atomic_load_n(&job.stop, __ATOMIC_RELAXED) && run_piece(&job, &own)) {
        if (own == XT_OK && xt_interrupted()) own = XT_INTERRUPTED;
        if (own != XT_OK) __atomic_store_n(&job.stop, 1, __ATOMIC_RELAXED);
    }
    inside = false;
    own_job = NULL;
    withdraw(&job);
    XtStatus status = own;
    if (status == XT_OK && job.status != XT_OK) status = xt_error(job.status, "%s", job.message);
    pthread_mutex_unlock(&one_job);
    return status;
}
