/* What Triton's driver (triton/backends/nvidia/driver.c) asks of libcuda besides made_kernels.c: its kernels are loaded and launched, not run. */
#include <stdint.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "card.h"
#include "device.h"

API CUresult cuCtxGetDevice(CUdevice *d) { *d = device_current(); return CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t *v, CUlimit l) { (void)l; *v = MiB; return CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit l, size_t v) { (void)l; (void)v; return CUDA_SUCCESS; }
API CUresult cuModuleUnload(CUmodule m) { (void)m; return CUDA_SUCCESS; }
API CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { (void)f; (void)c; return CUDA_SUCCESS; }
/* what a kernel asks to have is taken as it is, except for more shared memory than a block of this card can have */
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v)
{
    (void)f;
    if (a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && v > architecture_of_card()->smem_block_kb * (int)KiB)
        return CUDA_ERROR_INVALID_VALUE;
    return (int)a > CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c)
{
    (void)f; (void)c;
    *n = card()->sms;
    return CUDA_SUCCESS;
}
#undef cuStreamIsCapturing
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *st)
{
    return (CUresult)cudaStreamIsCapturing((cudaStream_t)s, (enum cudaStreamCaptureStatus *)st);
}
#undef cuLaunchKernelEx
API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **extra)
{
    (void)extra;
    return (CUresult)cudaLaunchKernel(f, (dim3){c->gridDimX, c->gridDimY, c->gridDimZ}, (dim3){c->blockDimX, c->blockDimY, c->blockDimZ},
                                      args, c->sharedMemBytes, (cudaStream_t)c->hStream);
}
