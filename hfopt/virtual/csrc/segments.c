/*
 * The driver calls behind expandable_segments: addresses are reserved, physical memory is created, one is mapped
 * onto the other. Only the creation costs memory.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cuda.h>

#include "board.h"
#include "card.h"
#include "device.h"
#include "memory.h"

static pthread_mutex_t handle_lock = PTHREAD_MUTEX_INITIALIZER;
typedef struct { size_t size; int physical, refs; } handle;

API CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr hint, unsigned long long f)
{
    (void)align; (void)hint; (void)f;
    void *m = map_pages(n);
    if (!m) return CUDA_ERROR_OUT_OF_MEMORY;
    address_reserve(m, n);
    *p = (CUdeviceptr)m;
    return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t n)
{
    (void)n;
    address_forget((void *)p);
    return CUDA_SUCCESS;
}
API CUresult cuMemGetAllocationGranularity(size_t *n, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags f)
{
    (void)prop; (void)f;
    *n = PAGE_2M;
    return CUDA_SUCCESS;
}
API CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long f)
{
    int physical = device_physical(prop->location.id);
    (void)f;
    if (board_forked()) return CUDA_ERROR_NOT_INITIALIZED;
    if (!board_charge(physical, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    handle *x = malloc(sizeof *x);
    *x = (handle){n, physical, 1};
    *h = (CUmemGenericAllocationHandle)(uintptr_t)x;
    return CUDA_SUCCESS;
}
static void handle_drop(handle *x) /* with the lock held */
{
    if (--x->refs) return;
    board_release(x->physical, x->size);
    free(x);
}

/* a mapping keeps its physical memory alive until it is unmapped */
static struct mapping { CUdeviceptr p; handle *h; } *mappings;
static size_t n_mappings, cap_mappings;

API CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
    pthread_mutex_lock(&handle_lock);
    handle_drop((handle *)(uintptr_t)h);
    pthread_mutex_unlock(&handle_lock);
    return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t n, size_t off, CUmemGenericAllocationHandle h, unsigned long long f)
{
    (void)n; (void)off; (void)f;
    pthread_mutex_lock(&handle_lock);
    if (n_mappings == cap_mappings) {
        cap_mappings = cap_mappings ? 2 * cap_mappings : 256;
        mappings = realloc(mappings, cap_mappings * sizeof *mappings);
    }
    mappings[n_mappings++] = (struct mapping){p, (handle *)(uintptr_t)h};
    ((handle *)(uintptr_t)h)->refs++;
    pthread_mutex_unlock(&handle_lock);
    return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr p, size_t n)
{
    pthread_mutex_lock(&handle_lock);
    for (size_t i = 0; i < n_mappings;) {
        if (mappings[i].p >= p && mappings[i].p < p + n) {
            handle_drop(mappings[i].h);
            mappings[i] = mappings[--n_mappings];
        } else {
            i++;
        }
    }
    pthread_mutex_unlock(&handle_lock);
    madvise((void *)p, n, MADV_DONTNEED);
    return CUDA_SUCCESS;
}
