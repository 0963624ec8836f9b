/* Copies, fills and memory pools: small ones move real bytes, so that the values layer and the host agree. */
#include <stdint.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "card.h"
#include "journal.h"
#include "memory.h"

/* Every pointer is host memory, so one memcpy serves all directions. Large writes to
 * the device are skipped: they are weights, whose values no kernel will ever read. */
static cudaError_t copy(void *dst, const void *src, size_t n)
{
    if (!n || dst == src) return cudaSuccess;
    if (n > card()->copy_limit_bytes && address_on_device(dst)) return cudaSuccess;
    memmove(dst, src, n);
    return cudaSuccess;
}
static cudaError_t fill(void *dst, int v, size_t n)
{
    if (n > card()->copy_limit_bytes && address_on_device(dst)) return cudaSuccess;
    memset(dst, v, n);
    return cudaSuccess;
}

/* between which of host and device, as the addresses say: cudaMemcpyDefault leaves it to them */
static void note_copy(const void *d, const void *s, size_t n, cudaStream_t st)
{
    if (journal_on()) journal("copy", st, "%d\t%d\t%zu", address_on_device(s), address_on_device(d), n);
}

API cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k)
{
    (void)k;
    note_copy(d, s, n, NULL);
    journal("sync", NULL, "copy");
    return copy(d, s, n);
}
API cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st)
{
    (void)k;
    note_copy(d, s, n, st);
    return copy(d, s, n);
}
API cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t st)
{
    (void)dd; (void)sd;
    note_copy(d, s, n, st);
    return copy(d, s, n);
}
API cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                                  enum cudaMemcpyKind k, cudaStream_t st)
{
    (void)k;
    note_copy(d, s, w * h, st);
    for (size_t i = 0; i < h; i++) copy((char *)d + i * dp, (const char *)s + i * sp, w);
    return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t st)
{
    journal("fill", st, "%zu", n);
    return fill(d, v, n);
}
API cudaError_t cudaMemset(void *d, int v, size_t n) { return cudaMemsetAsync(d, v, n, NULL); }

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d)
{
    *p = (cudaMemPool_t)(uintptr_t)(0x1000 + d);
    return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v)
{
    (void)p; (void)a;
    *(uint64_t *)v = 0;
    return cudaSuccess;
}
