/* What the process asked of the card, in order, for a cost model to price: see journal.c. */
#pragma once
#include <stddef.h>

int journal_on(void);                                       /* is anything to be written down now? */
void journal(const char *kind, const void *stream, const char *format, ...);
void journal_register(const void *kernel, const char *name); /* as the process starts: the names of the kernels it holds */
unsigned journal_kernel(const void *kernel);                 /* the number its name has in the journal; 0: it has none */
