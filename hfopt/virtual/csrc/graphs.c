/*
 * CUDA graphs: what is launched while a stream captures belongs to the graph, and replaying a graph launches nothing.
 *
 * A stream takes part in a capture from its begin on, or from its wait for an event that was recorded in it. Memory
 * is what matters here, and that is torch's: its allocator asks whether a capture is under way and serves it from the
 * graph's own pool. What the driver keeps for an instantiated graph is not charged.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "card.h"
#include "errors.h"
#include "journal.h"
#include "streams.h"

#define MOST_STREAMS 256

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static stream default_stream;
static stream *capturing[MOST_STREAMS];
static int n_capturing;
static unsigned long long last_capture;

stream *stream_of(cudaStream_t s) { return (uintptr_t)s > 2 ? (stream *)s : &default_stream; }

static cudaError_t join(stream *s, unsigned long long capture)
{
    cudaError_t e = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (n_capturing < MOST_STREAMS) {
        s->capture = capture;
        capturing[n_capturing++] = s;
    } else e = cudaErrorStreamCaptureUnsupported;
    pthread_mutex_unlock(&lock);
    return e ? fail(e) : e;
}
static int under_way(unsigned long long capture)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_capturing; i++) found |= capturing[i]->capture == capture;
    pthread_mutex_unlock(&lock);
    return found;
}
/* every stream of a capture, or (0) this one alone */
static void leave(stream *one, unsigned long long capture)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_capturing;)
        if (capture ? capturing[i]->capture == capture : capturing[i] == one) {
            capturing[i]->capture = 0;
            capturing[i] = capturing[--n_capturing];
        } else i++;
    pthread_mutex_unlock(&lock);
}
void capture_leave(stream *s) { leave(s, 0); }

API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m)
{
    (void)m;
    stream *of = stream_of(s);
    if (of == &default_stream) return fail(cudaErrorStreamCaptureUnsupported);
    if (of->capture) return fail(cudaErrorIllegalState);
    return join(of, ++last_capture);
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g)
{
    unsigned long long capture = stream_of(s)->capture;
    *g = NULL;
    if (!capture) return fail(cudaErrorIllegalState);
    leave(NULL, capture);
    *g = calloc(1, 16);
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *st)
{
    *st = stream_of(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *st, unsigned long long *id,
                                         cudaGraph_t *g, const cudaGraphNode_t **deps,
#if CUDART_VERSION >= 13000
                                         const cudaGraphEdgeData **edges,
#endif
                                         size_t *n)
{
    static char unfinished; /* the graph while it grows: callers only hand it back */
    if (st) cudaStreamIsCapturing(s, st);
    if (id) *id = stream_of(s)->capture;
    if (g) *g = stream_of(s)->capture ? (cudaGraph_t)&unfinished : NULL;
    if (deps) *deps = NULL;
#if CUDART_VERSION >= 13000
    if (edges) *edges = NULL;
#endif
    if (n) *n = 0;
    return cudaSuccess;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f)
{
    (void)f;
    unsigned long long capture = ((event *)e)->capture;
    journal("wait", s, "%p", (void *)e);
    if (!capture || stream_of(s)->capture || !under_way(capture)) return cudaSuccess;
    return join(stream_of(s), capture);
}
/* as on a card: nobody waits for work that is only being written down */
API cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    if (stream_of(s)->capture) return fail(cudaErrorStreamCaptureUnsupported);
    journal("sync", s, "stream");
    return cudaSuccess;
}
API cudaError_t cudaDeviceSynchronize(void)
{
    if (n_capturing) return fail(cudaErrorStreamCaptureUnsupported);
    journal("sync", NULL, "device");
    return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f)
{
    (void)g; (void)f;
    *e = calloc(1, 16);
    return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiate(e, g, f); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return cudaLaunchKernel((void *)e, (dim3){1, 1, 1}, (dim3){1, 1, 1}, NULL, 0, s); }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g); return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { free(e); return cudaSuccess; }
/* torch warns of a graph without nodes */
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { (void)g; (void)nodes; *n = 1; return cudaSuccess; }
API cudaError_t cudaUserObjectCreate(cudaUserObject_t *o, void *p, cudaHostFn_t destroy, unsigned references, unsigned f)
{
    (void)p; (void)destroy; (void)references; (void)f;
    *o = calloc(1, 16);
    return cudaSuccess;
}
API cudaError_t cudaUserObjectRelease(cudaUserObject_t o, unsigned n) { (void)o; (void)n; return cudaSuccess; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t g, cudaUserObject_t o, unsigned n, unsigned f)
{
    (void)g; (void)o; (void)n; (void)f;
    return cudaSuccess;
}
