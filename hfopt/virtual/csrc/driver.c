/* The slice of the driver API that torch looks up by name, and the stubs' common end. */
#include <stdio.h>
#include <string.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "card.h"
#include "device.h"
#include "memory.h"
#include "stub.h"

#define CONTEXT 0x2000 /* a context is this plus its device */

int stub_called(const char *name, int result)
{
    if (card()->trace) fprintf(stderr, "virtual gpu: stub %s\n", name);
    return result;
}

API CUresult cuInit(unsigned f) { (void)f; return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int *v) { *v = CUDART_VERSION; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { *n = card()->visible; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
/* the runtime's attribute numbers are the driver's */
API CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d)
{
    if (a == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        *v = 1;
        return CUDA_SUCCESS;
    }
    return (CUresult)cudaDeviceGetAttribute(v, (enum cudaDeviceAttr)a, d);
}
API CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)(uintptr_t)(CONTEXT + device_current()); return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c)
{
    if (c) device_select((int)((uintptr_t)c - CONTEXT));
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *active)
{
    (void)d;
    *f = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)(uintptr_t)(CONTEXT + d); return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult e, const char **s)
{
    *s = e == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : e ? "unknown error" : "no error";
    return CUDA_SUCCESS;
}
static CUresult succeed(void) { return CUDA_SUCCESS; }
API CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *n, CUdeviceptr p)
{
    uintptr_t start;
    size_t size;
    if (!address_range(p, &start, &size)) return CUDA_ERROR_INVALID_VALUE;
    if (base) *base = start;
    if (n) *n = size;
    return CUDA_SUCCESS;
}

/* cuda.h renames some of these to their _v2; the string keeps the plain name */
#define ENTRY(f) {#f, f}
static const struct { const char *name; void *f; } driver[] = {
    ENTRY(cuInit),
    ENTRY(cuDriverGetVersion),
    ENTRY(cuDeviceGetCount),
    ENTRY(cuDeviceGet),
    ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDevicePrimaryCtxGetState),
    ENTRY(cuDevicePrimaryCtxRetain),
    ENTRY(cuCtxGetCurrent),
    ENTRY(cuCtxSetCurrent),
    ENTRY(cuGetErrorString),
    ENTRY(cuMemAddressReserve),
    ENTRY(cuMemAddressFree),
    ENTRY(cuMemGetAllocationGranularity),
    ENTRY(cuMemCreate),
    ENTRY(cuMemRelease),
    ENTRY(cuMemMap),
    ENTRY(cuMemUnmap),
    ENTRY(cuMemGetAddressRange),
};

API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **f, unsigned ver, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *status)
{
    (void)ver; (void)flags;
    *f = NULL;
    for (size_t i = 0; i < sizeof driver / sizeof *driver; i++)
        if (!strcmp(driver[i].name, symbol)) *f = driver[i].f;
    if (!*f) {
        if (card()->trace) fprintf(stderr, "virtual gpu: no driver entry point %s\n", symbol);
        /* callers only look these up; they are called when the feature is used */
        *f = succeed;
    }
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
