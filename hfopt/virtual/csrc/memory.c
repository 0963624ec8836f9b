/*
 * Device, pinned and managed memory: counted against the card, mapped without being touched.
 *
 * Every pointer is host memory (MAP_NORESERVE), so a step of an 8B model costs the host less than a GiB.
 */
#define _GNU_SOURCE
#include "memory.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>

#include "board.h"
#include "card.h"
#include "device.h"
#include "errors.h"

enum kind { DEVICE, PINNED, REGISTERED, MANAGED, RESERVED };

typedef struct {
    uintptr_t base;
    size_t size;        /* bytes mapped */
    size_t charged;     /* bytes counted against the card */
    int device;         /* as CUDA_VISIBLE_DEVICES numbers them */
    enum kind kind;
} range;

static pthread_mutex_t mem_lock = PTHREAD_MUTEX_INITIALIZER;
static range *ranges; /* sorted by base */
static size_t n_ranges, cap_ranges;

/* index of the first range whose base is above p */
static size_t upper(uintptr_t p)
{
    size_t lo = 0, hi = n_ranges;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (ranges[mid].base <= p) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}
static range *range_of(uintptr_t p)
{
    size_t i = upper(p);
    if (!i) return NULL;
    range *r = &ranges[i - 1];
    return p < r->base + r->size ? r : NULL;
}
static void range_add(range r)
{
    if (n_ranges == cap_ranges) {
        cap_ranges = cap_ranges ? 2 * cap_ranges : 256;
        ranges = realloc(ranges, cap_ranges * sizeof *ranges);
    }
    size_t i = upper(r.base);
    memmove(&ranges[i + 1], &ranges[i], (n_ranges - i) * sizeof *ranges);
    ranges[i] = r;
    n_ranges++;
}
static void range_drop(range *r)
{
    size_t i = (size_t)(r - ranges);
    memmove(r, r + 1, (n_ranges - i - 1) * sizeof *ranges);
    n_ranges--;
}

/* Zero pages until something writes to them; huge pages would make one small
 * host-to-device copy cost 2 MiB of real memory. */
void *map_pages(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, size, MADV_NOHUGEPAGE);
    return p;
}

/* The driver hands out 2 MiB pages from 1 MiB on. */
static size_t driver_bytes(size_t size) { return size >= MiB ? ROUND_UP(size, PAGE_2M) : ROUND_UP(size, 512); }

static cudaError_t mem_new(void **out, size_t size, enum kind kind)
{
    int device = device_current(), on_device = kind == DEVICE; /* managed memory can be evicted to the host */
    size_t mapped = ROUND_UP(size ? size : 1, 4 * KiB);
    size_t cost = on_device ? driver_bytes(size) : 0;
    *out = NULL;
    if (board_forked()) return fail(cudaErrorInitializationError);
    if (!card()->visible) return fail(cudaErrorNoDevice);
    if (on_device && !board_charge(device_physical(device), cost)) {
        if (card()->trace) fprintf(stderr, "virtual gpu: %zu bytes do not fit\n", size);
        return fail(cudaErrorMemoryAllocation);
    }
    void *p = map_pages(mapped);
    if (!p) {
        if (on_device) board_release(device_physical(device), cost);
        return fail(cudaErrorMemoryAllocation);
    }
    pthread_mutex_lock(&mem_lock);
    range_add((range){(uintptr_t)p, mapped, cost, device, kind});
    pthread_mutex_unlock(&mem_lock);
    *out = p;
    return cudaSuccess;
}

static cudaError_t mem_delete(void *p)
{
    if (!p) return cudaSuccess;
    pthread_mutex_lock(&mem_lock);
    range *found = range_of((uintptr_t)p);
    if (!found || found->base != (uintptr_t)p) {
        pthread_mutex_unlock(&mem_lock);
        return fail(cudaErrorInvalidValue);
    }
    range r = *found;
    range_drop(found);
    pthread_mutex_unlock(&mem_lock);
    if (r.kind != REGISTERED) munmap((void *)r.base, r.size);
    if (r.charged) board_release(device_physical(r.device), r.charged);
    return cudaSuccess;
}

API cudaError_t cudaMalloc(void **p, size_t n) { return mem_new(p, n, DEVICE); }
API cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { (void)s; return mem_new(p, n, DEVICE); }
API cudaError_t cudaMallocManaged(void **p, size_t n, unsigned f) { (void)f; return mem_new(p, n, MANAGED); }
API cudaError_t cudaFree(void *p) { return mem_delete(p); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { (void)s; return mem_delete(p); }
API cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { (void)f; return mem_new(p, n, PINNED); }
API cudaError_t cudaMallocHost(void **p, size_t n) { return mem_new(p, n, PINNED); }
API cudaError_t cudaFreeHost(void *p) { return mem_delete(p); }
API cudaError_t cudaHostRegister(void *p, size_t n, unsigned f)
{
    (void)f;
    pthread_mutex_lock(&mem_lock);
    range_add((range){(uintptr_t)p, n, 0, device_current(), REGISTERED});
    pthread_mutex_unlock(&mem_lock);
    return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *p) { return mem_delete(p); }
API cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned f) { (void)f; *d = h; return cudaSuccess; }

API cudaError_t cudaMemGetInfo(size_t *available, size_t *all)
{
    int physical = device_physical(device_current());
    if (board_forked()) return fail(cudaErrorInitializationError);
    if (!board_attach(physical)) return fail(cudaErrorMemoryAllocation);
    uint64_t taken = board_used(physical);
    *all = card()->usable_bytes;
    *available = taken < *all ? *all - taken : 0;
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    memset(a, 0, sizeof *a);
    a->type = cudaMemoryTypeUnregistered;
    a->device = -2;
    a->hostPointer = (void *)p;
    pthread_mutex_lock(&mem_lock);
    range *r = range_of((uintptr_t)p);
    if (r) {
        a->device = r->device;
        a->devicePointer = (void *)p;
        if (r->kind == DEVICE || r->kind == RESERVED) {
            a->type = cudaMemoryTypeDevice;
            a->hostPointer = NULL;
        } else {
            a->type = r->kind == MANAGED ? cudaMemoryTypeManaged : cudaMemoryTypeHost;
        }
    }
    pthread_mutex_unlock(&mem_lock);
    return cudaSuccess;
}

int address_on_device(const void *p)
{
    pthread_mutex_lock(&mem_lock);
    range *r = range_of((uintptr_t)p);
    int yes = r && (r->kind == DEVICE || r->kind == RESERVED);
    pthread_mutex_unlock(&mem_lock);
    return yes;
}

void address_reserve(void *p, size_t bytes)
{
    pthread_mutex_lock(&mem_lock);
    range_add((range){(uintptr_t)p, bytes, 0, device_current(), RESERVED});
    pthread_mutex_unlock(&mem_lock);
}
void address_forget(void *p) { mem_delete(p); }

int address_range(uintptr_t p, uintptr_t *base, size_t *bytes)
{
    pthread_mutex_lock(&mem_lock);
    range *r = range_of(p);
    if (r) {
        *base = r->base;
        *bytes = r->size;
    }
    pthread_mutex_unlock(&mem_lock);
    return r != NULL;
}
