/* Kernels: registered, launched, and not run. A launch only leaves its mark on the board. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "board.h"
#include "card.h"
#include "device.h"
#include "errors.h"
#include "journal.h"
#include "memory.h"

static int no_kernel_image;

/* called by the Python side once it knows for which architectures this torch was built */
API void hfopt_virtual_refuse_kernels(void) { no_kernel_image = 1; }

/* the same way: the architecture of the kernels this card would load, by which CUB picks a variant among those compiled in */
static int kernels_cc;
API void hfopt_virtual_kernels_of(int cc) { kernels_cc = cc; }

static cudaError_t launch(const void *f, dim3 g, dim3 b, void **a, cudaStream_t s)
{
    if (journal_on()) {
        /* the first argument of PyTorch's elementwise kernels is how many elements there are (CUDALoops.cuh) */
        unsigned number = journal_kernel(f);
        journal("kernel", s, "%u\t%u,%u,%u\t%u,%u,%u\t%d", number, g.x, g.y, g.z, b.x, b.y, b.z, number && a && a[0] ? *(int *)a[0] : -1);
    }
    if (no_kernel_image) return fail(cudaErrorNoKernelImageForDevice);
    board_launched(device_physical(device_current()));
    return cudaSuccess;
}

API void **__cudaRegisterFatBinary(void *cubin) { (void)cubin; return calloc(1, 16); }
API void __cudaRegisterFatBinaryEnd(void **h) { (void)h; }
API void __cudaUnregisterFatBinary(void **h) { free(h); }
API void __cudaRegisterFunction(void **h, const char *host, char *dev, const char *name, int limit,
                                uint3 *tid, uint3 *bid, dim3 *bd, dim3 *gd, int *ws)
{
    journal_register(host, name);
    (void)h; (void)dev; (void)limit; (void)tid; (void)bid; (void)bd; (void)gd; (void)ws;
}

static struct symbol { const void *host; size_t size; void *dev; } *symbols;
static size_t n_symbols;

API void __cudaRegisterVar(void **h, char *host, char *dev, const char *name, int ext, size_t size, int constant, int global)
{
    (void)h; (void)dev; (void)name; (void)ext; (void)constant; (void)global;
    symbols = realloc(symbols, (n_symbols + 1) * sizeof *symbols);
    symbols[n_symbols++] = (struct symbol){host, size, NULL};
}
API cudaError_t cudaGetSymbolAddress(void **p, const void *sym)
{
    for (size_t i = 0; i < n_symbols; i++)
        if (symbols[i].host == sym) {
            if (!symbols[i].dev) symbols[i].dev = map_pages(ROUND_UP(symbols[i].size + 1, 4 * KiB));
            *p = symbols[i].dev;
            return cudaSuccess;
        }
    return fail(cudaErrorInvalidValue);
}

static __thread struct { dim3 grid, block; size_t smem; void *stream; } calls[16];
static __thread int n_calls;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, struct CUstream_st *stream)
{
    if (n_calls == 16) return 1;
    calls[n_calls].grid = grid;
    calls[n_calls].block = block;
    calls[n_calls].smem = smem;
    calls[n_calls++].stream = stream;
    return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *smem, void *stream)
{
    if (!n_calls) return fail(cudaErrorUnknown);
    n_calls--;
    *grid = calls[n_calls].grid;
    *block = calls[n_calls].block;
    *smem = calls[n_calls].smem;
    *(void **)stream = calls[n_calls].stream;
    return cudaSuccess;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *host)
{
    *k = (cudaKernel_t)host;
    return cudaSuccess;
}
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t sm, cudaStream_t s)
{
    (void)sm;
    return launch((const void *)k, g, b, a, s);
}
API cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t sm, cudaStream_t s)
{
    (void)sm;
    return launch(f, g, b, a, s);
}
API cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t sm, cudaStream_t s)
{
    (void)sm;
    return launch(f, g, b, a, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a)
{
    return launch(f, c->gridDim, c->blockDim, a, c->stream);
}

API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f)
{
    int cc = kernels_cc ? kernels_cc : card()->major * 10 + card()->minor;
    (void)f;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->ptxVersion = a->binaryVersion = cc;
    a->maxDynamicSharedSizeBytes = 48 * (int)KiB;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t smem, unsigned fl)
{
    const architecture *a = architecture_of_card();
    int by_threads = a->threads_sm / (block > 0 ? block : 1);
    int by_smem = (int)((size_t)a->smem_sm_kb * KiB / (smem + KiB));
    (void)f; (void)fl;
    *n = by_threads < by_smem ? by_threads : by_smem;
    if (*n > a->blocks_sm) *n = a->blocks_sm;
    return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t smem)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, smem, 0);
}
