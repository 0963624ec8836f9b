/*
 * Kernels made at run time (TorchScript's fuser, torch's jiterator): never
 * compiled, because they are never run, but loaded and launched like the others.
 */
#include <stdlib.h>
#include <string.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>

#include "card.h"

static const char no_code[] = ""; /* the empty image every program compiles to */

API nvrtcResult nvrtcVersion(int *major, int *minor)
{
    *major = CUDART_VERSION / 1000;
    *minor = CUDART_VERSION % 1000 / 10;
    return NVRTC_SUCCESS;
}
API const char *nvrtcGetErrorString(nvrtcResult e) { return e ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }
API nvrtcResult nvrtcCreateProgram(nvrtcProgram *p, const char *source, const char *name, int n, const char *const *headers,
                                   const char *const *includes)
{
    (void)source; (void)name; (void)n; (void)headers; (void)includes;
    *p = calloc(1, 16);
    return *p ? NVRTC_SUCCESS : NVRTC_ERROR_OUT_OF_MEMORY;
}
API nvrtcResult nvrtcDestroyProgram(nvrtcProgram *p)
{
    free(*p);
    *p = NULL;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcAddNameExpression(nvrtcProgram p, const char *name) { (void)p; (void)name; return NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetLoweredName(nvrtcProgram p, const char *name, const char **lowered)
{
    (void)p;
    *lowered = name;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcCompileProgram(nvrtcProgram p, int n, const char *const *options) { (void)p; (void)n; (void)options; return NVRTC_SUCCESS; }

#define IMAGE(What)                                                                                                   \
    API nvrtcResult nvrtcGet##What##Size(nvrtcProgram p, size_t *n) { (void)p; *n = sizeof no_code; return NVRTC_SUCCESS; } \
    API nvrtcResult nvrtcGet##What(nvrtcProgram p, char *out) { (void)p; memcpy(out, no_code, sizeof no_code); return NVRTC_SUCCESS; }
IMAGE(PTX)
IMAGE(CUBIN)
IMAGE(ProgramLog)

#define TOKEN 0x3000 /* a module or a function: nobody looks inside */

API CUresult cuModuleLoadData(CUmodule *m, const void *image) { (void)image; *m = (CUmodule)(uintptr_t)TOKEN; return CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *options, void **values)
{
    (void)n; (void)options; (void)values;
    return cuModuleLoadData(m, image);
}
API CUresult cuModuleLoad(CUmodule *m, const char *file) { return cuModuleLoadData(m, file); }
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
{
    (void)m; (void)name;
    *f = (CUfunction)(uintptr_t)TOKEN;
    return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f)
{
    struct cudaFuncAttributes of;
    cudaFuncGetAttributes(&of, f);
    *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? of.maxThreadsPerBlock
       : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? of.numRegs
       : a == CU_FUNC_ATTRIBUTE_PTX_VERSION ? of.ptxVersion
       : a == CU_FUNC_ATTRIBUTE_BINARY_VERSION ? of.binaryVersion
       : a == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? of.maxDynamicSharedSizeBytes : 0;
    return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t smem)
{
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, f, block, smem);
}

API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                       unsigned smem, CUstream s, void **args)
{
    return (CUresult)cudaLaunchKernel(f, (dim3){gx, gy, gz}, (dim3){bx, by, bz}, args, smem, (cudaStream_t)s);
}
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
                            CUstream s, void **args, void **extra)
{
    (void)extra;
    return cuLaunchCooperativeKernel(f, gx, gy, gz, bx, by, bz, smem, s, args);
}

/* The compiler itself, when something calls it past torch, asks for tables only the driver has. */
API CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
