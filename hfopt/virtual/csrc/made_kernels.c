/*
 * Kernels made at run time (TorchScript's fuser, torch's jiterator). torch opens
 * the real nvrtc itself, so they are compiled; here, in the driver, they are
 * loaded and launched like the others, and not run.
 */
#include <stdint.h>
#include <string.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "card.h"
#include "journal.h"

#define TOKEN 0x3000 /* a module: nobody looks inside */

API CUresult cuModuleLoadData(CUmodule *m, const void *image) { (void)image; *m = (CUmodule)(uintptr_t)TOKEN; return CUDA_SUCCESS; }
API CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned n, CUjit_option *options, void **values)
{
    (void)n; (void)options; (void)values;
    return cuModuleLoadData(m, image);
}
API CUresult cuModuleLoad(CUmodule *m, const char *file) { return cuModuleLoadData(m, file); }
API CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
{
    char *own = strdup(name); /* a function is its name: nobody else looks inside */
    (void)m;
    journal_register(own, own);
    *f = (CUfunction)own;
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

/* The compiler asks for tables that only the real driver has, and does without. */
API CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
