/* The current device of each thread, and the figures that differ between architectures. */
#pragma once

typedef struct {
    int capability; /* 10 × major + minor */
    int smem_sm_kb, smem_block_kb, threads_sm, blocks_sm, l2_mb;
} architecture;

const architecture *architecture_of_card(void);
int device_current(void);  /* as CUDA_VISIBLE_DEVICES numbers them */
void device_select(int device);
int device_physical(int device);
