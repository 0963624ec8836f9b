/* Streams and events: nothing is ever pending, so all of it is complete at once. */
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "card.h"
#include "errors.h"

static void *token(void) { return calloc(1, 16); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p)
{
    (void)f;
    int *t = token();
    *t = p;
    *s = (cudaStream_t)t;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    if ((uintptr_t)s > 2) free(s);
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p)
{
    *p = (uintptr_t)s > 2 ? *(int *)s : 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *st)
{
    (void)s;
    *st = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *st, unsigned long long *id,
                                         cudaGraph_t *g, const cudaGraphNode_t **deps,
#if CUDART_VERSION >= 13000
                                         const cudaGraphEdgeData **edges,
#endif
                                         size_t *n)
{
    (void)s;
    if (st) *st = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (g) *g = NULL;
    if (deps) *deps = NULL;
#if CUDART_VERSION >= 13000
    if (edges) *edges = NULL;
#endif
    if (n) *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m)
{
    (void)s; (void)m;
    return fail(cudaErrorNotSupported);
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { (void)m; return cudaSuccess; }
/* all earlier work on the stream is, trivially, finished */
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *u) { (void)s; f(u); return cudaSuccess; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *u, unsigned fl)
{
    (void)fl;
    f(s, cudaSuccess, u);
    return cudaSuccess;
}

/* An event knows when the host recorded it: there is no device whose clock could differ. */
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f)
{
    (void)f;
    *e = calloc(1, sizeof(struct timespec));
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f)
{
    (void)s; (void)f;
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e);
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b)
{
    const struct timespec *from = (struct timespec *)a, *to = (struct timespec *)b;
    *ms = (float)((double)(to->tv_sec - from->tv_sec) * 1e3 + (double)(to->tv_nsec - from->tv_nsec) / 1e6);
    return cudaSuccess;
}
