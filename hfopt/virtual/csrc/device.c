/* Device queries: count, properties, attributes. */
#include "device.h"

#include <stdio.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "board.h"
#include "card.h"
#include "errors.h"

static __thread int current_device;

int device_current(void) { return current_device; }
void device_select(int device) { current_device = device; }
int device_physical(int device) { return card()->physical_of[device]; }

/* CUDA C programming guide, table "technical specifications per compute capability". */
static const architecture architectures[] = {
    {60, 64, 48, 2048, 32, 4},    {61, 96, 48, 2048, 32, 2},
    {70, 96, 96, 2048, 32, 6},    {75, 64, 64, 1024, 16, 4},
    {80, 164, 163, 2048, 32, 40}, {86, 100, 99, 1536, 16, 4},
    {87, 164, 163, 1536, 16, 4},  {89, 100, 99, 1536, 24, 48},
    {90, 228, 227, 2048, 32, 50}, {100, 228, 227, 2048, 32, 126},
    {103, 228, 227, 2048, 32, 126}, {120, 100, 99, 1536, 24, 64},
};

const architecture *architecture_of_card(void)
{
    int capability = card()->major * 10 + card()->minor;
    const architecture *best = &architectures[0];
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
        if (architectures[i].capability <= capability) best = &architectures[i];
    return best;
}

API cudaError_t cudaGetDeviceCount(int *n)
{
    if (board_forked()) return fail(cudaErrorInitializationError);
    *n = card()->visible;
    return *n ? cudaSuccess : fail(cudaErrorNoDevice);
}
API cudaError_t cudaSetDevice(int d)
{
    if (d < 0 || d >= card()->visible) return fail(cudaErrorInvalidDevice);
    current_device = d;
    return cudaSuccess;
}
API cudaError_t cudaGetDevice(int *d)
{
    if (!card()->visible) return fail(cudaErrorNoDevice);
    *d = current_device;
    return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)
{
    const card_facts *c = card();
    const architecture *a = architecture_of_card();
    if (d < 0 || d >= c->visible) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    memcpy(p->name, c->name, sizeof p->name);
    card_uuid(device_physical(d), (unsigned char *)p->uuid.bytes);
    p->totalGlobalMem = c->usable_bytes;
    p->sharedMemPerBlock = 48 * KiB;
    p->sharedMemPerBlockOptin = (size_t)a->smem_block_kb * KiB;
    p->sharedMemPerMultiprocessor = (size_t)a->smem_sm_kb * KiB;
    p->reservedSharedMemPerBlock = c->major >= 8 ? 1 * KiB : 0;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 0x7fffffff;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 64 * KiB;
    p->major = c->major;
    p->minor = c->minor;
    p->textureAlignment = 512;
    p->texturePitchAlignment = 32;
    p->surfaceAlignment = 512;
    p->multiProcessorCount = c->sms;
    p->canMapHostMemory = 1;
    p->concurrentKernels = 1;
    p->pciBusID = device_physical(d) + 1;
    p->asyncEngineCount = 2;
    p->unifiedAddressing = 1;
    p->memoryBusWidth = 256;
    p->l2CacheSize = a->l2_mb * (int)MiB;
    p->maxThreadsPerMultiProcessor = a->threads_sm;
    p->maxBlocksPerMultiProcessor = a->blocks_sm;
    p->streamPrioritiesSupported = 1;
    p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->managedMemory = 1;
    p->concurrentManagedAccess = 1;
    p->computePreemptionSupported = 1;
    p->canUseHostPointerForRegisteredMem = 1;
    p->cooperativeLaunch = 1;
    p->hostRegisterSupported = 1;
    p->memoryPoolsSupported = 1;
    p->clusterLaunch = c->major >= 9;
    p->unifiedFunctionPointers = 1;
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr attr, int d)
{
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, d);
    if (e) return e;
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *v = p.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *v = p.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *v = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *v = p.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *v = p.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = (int)p.reservedSharedMemPerBlock; break;
    case cudaDevAttrTotalConstantMemory: *v = (int)p.totalConstMem; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrClockRate: *v = 1500000; break;
    case cudaDevAttrMemoryClockRate: *v = 7000000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = p.memoryBusWidth; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrTextureAlignment: *v = 512; break;
    case cudaDevAttrPciBusId: *v = p.pciBusID; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *v = 1; break;
    case cudaDevAttrHostNumaId: *v = -1; break;
    default: *v = 0; break;
    }
    return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char *s, int len, int d)
{
    if (d < 0 || d >= card()->visible) return fail(cudaErrorInvalidDevice);
    snprintf(s, (size_t)len, "0000:%02x:00.0", device_physical(d) + 1);
    return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b)
{
    (void)a; (void)b;
    *can = 0;
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
