/* Streams and events: nothing is ever pending, so all of it is complete at once. */
#include <stdint.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "card.h"
#include "clock.h"
#include "journal.h"
#include "streams.h"

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p)
{
    (void)f;
    stream *new = calloc(1, sizeof *new);
    new->priority = p;
    *s = (cudaStream_t)new;
    return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
API cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
API cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    if ((uintptr_t)s > 2) {
        capture_leave(stream_of(s));
        free(s);
    }
    return cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p)
{
    *p = stream_of(s)->priority;
    return cudaSuccess;
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

/* An event knows when the clock says that the card was done: see clock.c. */
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f)
{
    (void)f;
    *e = calloc(1, sizeof(event));
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f)
{
    (void)f;
    ((event *)e)->capture = stream_of(s)->capture;
    journal("record", s, "%p", (void *)e);
    ((event *)e)->recorded_ns = clock_event_ns();
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    journal("sync", NULL, "%p", (void *)e);
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b)
{
    *ms = (float)((double)(((event *)b)->recorded_ns - ((event *)a)->recorded_ns) / 1e6);
    return cudaSuccess;
}
