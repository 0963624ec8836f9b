/*
 * cuDNN: descriptors are empty tokens, every plan exists and needs no workspace.
 * RNN, CTC and spatial transformers answer "not supported" (see hfopt/virtual/build.py).
 */
#include <stdlib.h>
#include <string.h>

#include <cudnn.h>

#include "card.h"
#include "journal.h"

#define OK CUDNN_STATUS_SUCCESS

static cudnnStatus_t make(void *out)
{
    *(void **)out = calloc(1, 64);
    return OK;
}
static cudnnStatus_t drop(void *p)
{
    free(p);
    return OK;
}

#define DESCRIPTOR(Name)                                                                        \
    API cudnnStatus_t cudnnCreate##Name##Descriptor(cudnn##Name##Descriptor_t *d) { return make(d); } \
    API cudnnStatus_t cudnnDestroy##Name##Descriptor(cudnn##Name##Descriptor_t d) { return drop(d); }
DESCRIPTOR(Tensor)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Activation)
DESCRIPTOR(Pooling)
DESCRIPTOR(Dropout)

API cudnnStatus_t cudnnCreate(cudnnHandle_t *h) { return make(h); }
API cudnnStatus_t cudnnDestroy(cudnnHandle_t h) { return drop(h); }
API cudnnStatus_t cudnnSetStream(cudnnHandle_t h, cudaStream_t s)
{
    *(cudaStream_t *)h = s;
    return OK;
}
API cudnnStatus_t cudnnGetStream(cudnnHandle_t h, cudaStream_t *s)
{
    *s = *(cudaStream_t *)h;
    return OK;
}
API cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t h, size_t *n) { (void)h; *n = 1 << 20; return OK; }

/* The graph API, by which torch runs convolutions and (on sm_90 and later) attention. */
API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t *d)
{
    (void)t;
    return make(d);
}
API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) { return drop(d); }
API cudnnStatus_t cudnnBackendGetAttribute(const cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t want, int64_t *got, void *out)
{
    int64_t n = type == CUDNN_TYPE_NUMERICAL_NOTE || type == CUDNN_TYPE_BEHAVIOR_NOTE || type == CUDNN_TYPE_KNOB_TYPE ? 0 : 1;
    (void)d; (void)name;
    if (got) *got = n;
    /* one engine configuration; descriptors were made by the caller, all numbers are zero */
    if (n && out && want > 0 && type != CUDNN_TYPE_BACKEND_DESCRIPTOR)
        memset(out, 0, type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_DOUBLE ? 8 : type == CUDNN_TYPE_BOOLEAN || type == CUDNN_TYPE_CHAR ? 1 : 4);
    return OK;
}

/* The signatures are the library's: most of what they take matters to a real card alone. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* what runs: the journal's operation knows its shapes */
static cudnnStatus_t run(cudnnHandle_t h)
{
    journal("library", *(cudaStream_t *)h, "cudnn");
    return OK;
}
API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t h, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) { return run(h); }

/* The older API. */
#define ALGORITHM(Name, Perf, A, B, C)                                                                          \
    API cudnnStatus_t cudnnGetConvolution##Name##Algorithm_v7(                                                  \
        cudnnHandle_t h, const A a, const B b, const cudnnConvolutionDescriptor_t cd, const C c, const int want, \
        int *got, Perf *p)                                                                                      \
    {                                                                                                           \
        (void)h; (void)a; (void)b; (void)cd; (void)c;                                                           \
        *got = want > 0;                                                                                        \
        if (want > 0) memset(p, 0, sizeof *p);                                                                  \
        return OK;                                                                                              \
    }
ALGORITHM(Forward, cudnnConvolutionFwdAlgoPerf_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t)
ALGORITHM(BackwardData, cudnnConvolutionBwdDataAlgoPerf_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t)
ALGORITHM(BackwardFilter, cudnnConvolutionBwdFilterAlgoPerf_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t)

#define WORKSPACE(Name, Algo, A, B, C)                                                                        \
    API cudnnStatus_t cudnnGetConvolution##Name##WorkspaceSize(                                               \
        cudnnHandle_t h, const A a, const B b, const cudnnConvolutionDescriptor_t cd, const C c, Algo g, size_t *n) \
    {                                                                                                         \
        (void)h; (void)a; (void)b; (void)cd; (void)c; (void)g;                                                \
        *n = 0;                                                                                               \
        return OK;                                                                                            \
    }
WORKSPACE(Forward, cudnnConvolutionFwdAlgo_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t)
WORKSPACE(BackwardData, cudnnConvolutionBwdDataAlgo_t, cudnnFilterDescriptor_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t)
WORKSPACE(BackwardFilter, cudnnConvolutionBwdFilterAlgo_t, cudnnTensorDescriptor_t, cudnnTensorDescriptor_t, cudnnFilterDescriptor_t)

API cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t z, const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t s,
    const cudnnActivationDescriptor_t a, size_t *n)
{
    (void)h; (void)m; (void)o; (void)x; (void)z; (void)y; (void)s; (void)a;
    *n = 0;
    return OK;
}
API cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnTensorDescriptor_t x,
    const cudnnTensorDescriptor_t y, const cudnnTensorDescriptor_t dy, const cudnnTensorDescriptor_t dz,
    const cudnnTensorDescriptor_t dx, const cudnnTensorDescriptor_t s, const cudnnActivationDescriptor_t a, size_t *n)
{
    (void)h; (void)m; (void)o; (void)x; (void)y; (void)dy; (void)dz; (void)dx; (void)s; (void)a;
    *n = 0;
    return OK;
}
API cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t h, cudnnBatchNormMode_t m, cudnnBatchNormOps_t o, const cudnnActivationDescriptor_t a,
    const cudnnTensorDescriptor_t x, size_t *n)
{
    (void)h; (void)m; (void)o; (void)a; (void)x;
    *n = 0;
    return OK;
}

API cudnnStatus_t cudnnConvolutionForward(cudnnHandle_t h, const void *alpha, const cudnnTensorDescriptor_t xd, const void *x,
                                          const cudnnFilterDescriptor_t wd, const void *w, const cudnnConvolutionDescriptor_t cd,
                                          cudnnConvolutionFwdAlgo_t algo, void *space, size_t n, const void *beta,
                                          const cudnnTensorDescriptor_t yd, void *y)
{
    return run(h);
}
API cudnnStatus_t cudnnConvolutionBackwardData(cudnnHandle_t h, const void *alpha, const cudnnFilterDescriptor_t wd, const void *w,
                                               const cudnnTensorDescriptor_t dyd, const void *dy, const cudnnConvolutionDescriptor_t cd,
                                               cudnnConvolutionBwdDataAlgo_t algo, void *space, size_t n, const void *beta,
                                               const cudnnTensorDescriptor_t dxd, void *dx)
{
    return run(h);
}
API cudnnStatus_t cudnnConvolutionBackwardFilter(cudnnHandle_t h, const void *alpha, const cudnnTensorDescriptor_t xd, const void *x,
                                                 const cudnnTensorDescriptor_t dyd, const void *dy, const cudnnConvolutionDescriptor_t cd,
                                                 cudnnConvolutionBwdFilterAlgo_t algo, void *space, size_t n, const void *beta,
                                                 const cudnnFilterDescriptor_t dwd, void *dw)
{
    return run(h);
}
