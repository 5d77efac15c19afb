/* fake_nccl.c - a libnccl.so.2 for the device of fake_device.c, whose ranks are processes of one host: bytes go through files of a folder
 * that the unique id names. As in NCCL, calls only queue work, a thread does it, and ranks that do not do the same wait for ever.
 *
 * FAKE_NCCL_VERSION: what it says it is. FAKE_NCCL_FAILS: the function that fails. FAKE_NCCL_ASYNC: exchanges after which
 * ncclCommGetAsyncError reports that a peer is lost.
 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4, REMOTE_ERROR = 6, MOST = 256 };

typedef struct Id {
    char folder[128];
} Id;
typedef struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, fewest, most;
    const char *net;
    int split_share;
} Config;
typedef struct Part {
    bool sends;
    int peer, index; /* of those that this rank sends to the peer in the group, or receives from it */
    char *data;
    size_t count;
} Part;
typedef struct Stream Stream;
typedef struct Op {
    struct Op *next;
    Stream *stream;
    long number;
    int count;
    Part parts[MOST];
} Op;
struct Stream {                                          /* of fake_device.c */
    int pending;                                         /* what its idle() looks at */
    int (*record)(void (*call)(void *), void *argument); /* keeps a call of a capture; NULL outside of one */
};
typedef struct Comm {
    char folder[128];
    int rank, size;
    pthread_t worker;
    pthread_mutex_t lock;
    pthread_cond_t more;
    Op *first, **last;
    long queued;
    bool stopping, aborted;
} Comm;

static __thread Op *group;
static __thread int depth; /* of groups within each other */
static __thread Comm *grouped;

static bool fails(const char *function) {
    const char *name = getenv("FAKE_NCCL_FAILS");
    return name && !strcmp(name, function);
}

int ncclGetVersion(int *out) {
    const char *text = getenv("FAKE_NCCL_VERSION");
    *out = text ? atoi(text) : 22809;
    return SUCCESS;
}
const char *ncclGetErrorString(int error) { return error == REMOTE_ERROR ? "remote process exited" : "unhandled system error"; }
const char *ncclGetLastError(void *comm) { return comm ? "said by the fake" : ""; }

int ncclGetUniqueId(Id *out) {
    const char *base = getenv("TMPDIR");
    memset(out, 0, sizeof *out);
    snprintf(out->folder, sizeof out->folder, "%s/fake_nccl-XXXXXX", base ? base : "/tmp");
    return mkdtemp(out->folder) ? SUCCESS : SYSTEM_ERROR;
}

static void path_of(const Comm *comm, char *path, size_t room, long number, int from, int to, int index) {
    snprintf(path, room, "%s/%ld-%d-%d-%d", comm->folder, number, from, to, index);
}

static void put(const Comm *comm, long number, const Part *part) {
    char path[310], whole[300];
    path_of(comm, whole, sizeof whole, number, comm->rank, part->peer, part->index);
    snprintf(path, sizeof path, "%s.part", whole);
    FILE *file = fopen(path, "wb");
    if (!file) return;
    fwrite(part->data, 1, part->count, file);
    fclose(file);
    rename(path, whole);
}

/* Returns when it is there, with this size, or the communicator has been aborted. */
static void take(const Comm *comm, long number, const Part *part) {
    char path[300];
    struct stat found;
    path_of(comm, path, sizeof path, number, part->peer, comm->rank, part->index);
    while (stat(path, &found) != 0 || (size_t)found.st_size != part->count) {
        if (__atomic_load_n(&comm->aborted, __ATOMIC_ACQUIRE)) return;
        usleep(200);
    }
    FILE *file = fopen(path, "rb");
    if (!file || fread(part->data, 1, part->count, file) != part->count) abort();
    fclose(file);
    unlink(path);
}

static void *work(void *argument) {
    Comm *comm = argument;
    for (;;) {
        pthread_mutex_lock(&comm->lock);
        while (!comm->first && !comm->stopping) pthread_cond_wait(&comm->more, &comm->lock);
        Op *op = comm->first;
        if (op && !(comm->first = op->next)) comm->last = &comm->first;
        pthread_mutex_unlock(&comm->lock);
        if (!op) return NULL;
        if (!comm->aborted) usleep(2000); /* who reads before the device is idle finds old bytes */
        for (int i = 0; i < op->count; i++)
            if (op->parts[i].sends) put(comm, op->number, &op->parts[i]);
        for (int i = 0; i < op->count; i++)
            if (!op->parts[i].sends) take(comm, op->number, &op->parts[i]);
        __atomic_sub_fetch(&op->stream->pending, 1, __ATOMIC_RELEASE);
        free(op);
    }
}

int ncclCommInitRankConfig(void **out, int size, Id id, int rank, Config *config) {
    char path[300];
    struct stat found;
    if (fails("CommInitRankConfig")) return SYSTEM_ERROR;
    if (config->size < sizeof *config || config->magic != 0xcafebeef || config->blocking != 1 || rank < 0 || rank >= size)
        return INVALID;
    Comm *comm = calloc(1, sizeof *comm);
    memcpy(comm->folder, id.folder, sizeof comm->folder);
    comm->rank = rank;
    comm->size = size;
    comm->last = &comm->first;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->more, NULL);
    path_of(comm, path, sizeof path, 0, rank, rank, 0);
    close(open(path, O_CREAT | O_WRONLY, 0600));
    for (int peer = 0; peer < size; peer++) {
        path_of(comm, path, sizeof path, 0, peer, peer, 0);
        while (stat(path, &found) != 0) usleep(200);
    }
    pthread_create(&comm->worker, NULL, work, comm);
    *out = comm;
    return SUCCESS;
}

static int end_comm(Comm *comm, bool aborted) {
    __atomic_store_n(&comm->aborted, aborted, __ATOMIC_RELEASE);
    pthread_mutex_lock(&comm->lock);
    comm->stopping = true;
    pthread_cond_signal(&comm->more);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->worker, NULL);
    char path[300];
    path_of(comm, path, sizeof path, 0, comm->rank, comm->rank, 0);
    unlink(path);
    rmdir(comm->folder); /* the last one can */
    free(comm);
    return SUCCESS;
}
int ncclCommDestroy(void *comm) { return end_comm(comm, false); }
int ncclCommAbort(void *comm) { return end_comm(comm, true); }
int ncclCommGetAsyncError(void *comm, int *error) {
    const char *after = getenv("FAKE_NCCL_ASYNC");
    *error = after && ((Comm *)comm)->queued > atol(after) ? REMOTE_ERROR : SUCCESS;
    return SUCCESS;
}

/* ---- collectives --------------------------------------------------------------------------------------------------------------- */

int ncclGroupStart(void) {
    if (depth++ == 0) group = calloc(1, sizeof *group);
    return SUCCESS;
}
static void queue(Comm *comm, Op *op) {
    op->number = ++comm->queued;
    __atomic_add_fetch(&op->stream->pending, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&comm->lock);
    *comm->last = op;
    comm->last = &op->next;
    pthread_cond_signal(&comm->more);
    pthread_mutex_unlock(&comm->lock);
}

typedef struct Kept { /* an exchange of a graph */
    Comm *comm;
    Op op;
} Kept;
static void again(void *argument) {
    const Kept *kept = argument;
    Op *op = malloc(sizeof *op);
    *op = kept->op;
    op->next = NULL;
    queue(kept->comm, op);
}

int ncclGroupEnd(void) {
    if (--depth > 0) return SUCCESS;
    Op *op = group;
    Comm *comm = grouped;
    group = NULL;
    grouped = NULL;
    if (op->count == 0) {
        free(op);
        return SUCCESS;
    }
    if (!op->stream->record) {
        queue(comm, op);
        return SUCCESS;
    }
    Kept *kept = malloc(sizeof *kept);
    *kept = (Kept){comm, *op};
    free(op);
    return kept->op.stream->record(again, kept);
}

static int add(Comm *comm, bool sends, int peer, const void *data, size_t count, void *stream) {
    if (group->count == MOST) return INVALID;
    grouped = comm;
    group->stream = stream;
    int index = 0;
    for (int i = 0; i < group->count; i++) index += group->parts[i].sends == sends && group->parts[i].peer == peer;
    group->parts[group->count++] = (Part){sends, peer, index, (char *)data, count};
    return SUCCESS;
}
int ncclSend(const void *data, size_t count, int dtype, int peer, void *comm, void *stream) {
    return dtype != 0 || fails("Send") ? SYSTEM_ERROR : add(comm, true, peer, data, count, stream);
}
int ncclRecv(void *data, size_t count, int dtype, int peer, void *comm, void *stream) {
    return dtype != 0 || fails("Recv") ? SYSTEM_ERROR : add(comm, false, peer, data, count, stream);
}
int ncclAllGather(const void *in, void *out, size_t count, int dtype, void *comm, void *stream) {
    if (dtype != 0 || fails("AllGather")) return SYSTEM_ERROR;
    ncclGroupStart();
    int error = SUCCESS;
    for (int peer = 0; peer < ((Comm *)comm)->size && error == SUCCESS; peer++) {
        error = add(comm, true, peer, in, count, stream);
        if (error == SUCCESS) error = add(comm, false, peer, (char *)out + (size_t)peer * count, count, stream);
    }
    const int ended = ncclGroupEnd();
    return error != SUCCESS ? error : ended;
}
int ncclBroadcast(const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream) {
    if (dtype != 0 || fails("Broadcast")) return SYSTEM_ERROR;
    ncclGroupStart();
    if (((Comm *)comm)->rank == root)
        for (int peer = 0; peer < ((Comm *)comm)->size; peer++) add(comm, true, peer, in, count, stream);
    add(comm, false, root, out, count, stream);
    return ncclGroupEnd();
}
