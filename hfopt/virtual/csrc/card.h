/* The card this process sees: read once from the environment that hfopt.virtual.environment writes. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))
#define KiB ((size_t)1 << 10)
#define MiB ((size_t)1 << 20)
#define PAGE_2M (2 * MiB)
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))
#define MAX_DEVICES 16

typedef struct {
    char name[256];
    size_t memory_bytes;    /* what NVML reports as total */
    size_t usable_bytes;    /* what CUDA shows a program as total: without the driver's own part */
    size_t context_bytes;   /* what the CUDA context of one process takes */
    size_t copy_limit_bytes; /* copies to the device above this move no bytes */
    int major, minor;       /* compute capability */
    int sms;
    int power_limit_w;
    int physical;           /* cards in the machine */
    int visible;            /* those CUDA_VISIBLE_DEVICES leaves, in its order */
    int physical_of[MAX_DEVICES];
    int trace;              /* 1: generated stubs and failed allocations are written to stderr */
} card_facts;

const card_facts *card(void);
void card_uuid(int physical, unsigned char uuid[16]);
void card_uuid_text(int physical, char text[41]);
