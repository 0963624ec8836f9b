/*
 * NCCL without peers: every collective pretends that all ranks hold what this one
 * holds. Enough for DataParallel, and for DDP under torchrun (one virtual card each).
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nohalf.h"
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "card.h"
#include "journal.h"

struct ncclComm { int ranks, rank; };

static ncclResult_t make(ncclComm_t *c, int ranks, int rank)
{
    *c = malloc(sizeof **c);
    **c = (struct ncclComm){ranks, rank};
    return ncclSuccess;
}
static size_t bytes(size_t n, ncclDataType_t t)
{
    static const size_t width[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return n * width[t];
}
/* a collective, its ranks, and the bytes of its larger buffer on this one */
static void note(const char *what, const struct ncclComm *c, size_t n, cudaStream_t s) { journal("nccl", s, "%s\t%d\t%zu", what, c->ranks, n); }

static ncclResult_t copy(void *dst, const void *src, size_t n)
{
    if (dst != src && n <= card()->copy_limit_bytes) memmove(dst, src, n);
    return ncclSuccess;
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    *(int *)id = getpid();
    return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int rank) { (void)id; return make(c, n, rank); }
API ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int rank, ncclConfig_t *cfg)
{
    (void)id; (void)cfg;
    return make(c, n, rank);
}
API ncclResult_t ncclCommInitAll(ncclComm_t *c, int n, const int *devices)
{
    (void)devices;
    for (int i = 0; i < n; i++) make(&c[i], n, i);
    return ncclSuccess;
}
API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *out, ncclConfig_t *cfg)
{
    (void)color; (void)key; (void)cfg;
    return make(out, c->ranks, c->rank);
}
API ncclResult_t ncclCommDestroy(ncclComm_t c) { free(c); return ncclSuccess; }
API ncclResult_t ncclCommAbort(ncclComm_t c) { free(c); return ncclSuccess; }
API ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = c->ranks; return ncclSuccess; }
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int *r) { *r = c->rank; return ncclSuccess; }
API ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) { (void)c; *e = ncclSuccess; return ncclSuccess; }

API ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t st)
{
    (void)op;
    note("all_reduce", c, bytes(n, t), st);
    return copy(r, s, bytes(n, t));
}
API ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t st)
{
    (void)op;
    note("reduce", c, bytes(n, t), st);
    return root == c->rank ? copy(r, s, bytes(n, t)) : ncclSuccess;
}
API ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st)
{
    note("broadcast", c, bytes(n, t), st);
    return root == c->rank ? copy(r, s, bytes(n, t)) : ncclSuccess;
}
API ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t st)
{
    (void)op;
    note("reduce_scatter", c, c->ranks * bytes(n, t), st);
    return copy(r, (const char *)s + (size_t)c->rank * bytes(n, t), bytes(n, t));
}
API ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st)
{
    note("all_gather", c, c->ranks * bytes(n, t), st);
    for (int i = 0; i < c->ranks; i++) copy((char *)r + (size_t)i * bytes(n, t), s, bytes(n, t));
    return ncclSuccess;
}
API ncclResult_t ncclMemAlloc(void **p, size_t n) { return cudaMalloc(p, n) ? ncclUnhandledCudaError : ncclSuccess; }
API ncclResult_t ncclMemFree(void *p) { cudaFree(p); return ncclSuccess; }
