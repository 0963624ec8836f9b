/* What every process of one launch shares: who holds how much of which card, and when kernels ran. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct {
    int pid;
    uint64_t bytes; /* its context included */
    unsigned utilization_percent;
} board_process;

/* All take physical device numbers. */
int board_charge(int device, size_t bytes);     /* 0: it does not fit */
void board_release(int device, size_t bytes);
int board_attach(int device);                   /* charges this process's context once; 0: it does not fit */
int board_forked(void);                         /* this process inherited a context by fork and may not use it */
void board_launched(int device);                /* a kernel ran now */

uint64_t board_used(int device);
unsigned board_utilization_percent(int device); /* share of the last second in which a kernel ran */
uint64_t board_launches(int device);
int board_processes(int device, board_process *out, int room);
