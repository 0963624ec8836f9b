/* The map of every address the runtime handed out. */
#pragma once
#include <stddef.h>
#include <stdint.h>

void *map_pages(size_t bytes);             /* zero pages until something writes to them */
int address_on_device(const void *p);
void address_reserve(void *p, size_t bytes); /* expandable segments: addresses without memory behind them */
void address_forget(void *p);
int address_range(uintptr_t p, uintptr_t *base, size_t *bytes); /* 0: not ours */
