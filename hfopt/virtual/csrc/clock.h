/* The clock of a timed rehearsal: see clock.c. */
#pragma once

long long clock_ns(void);             /* what the clock says now */
long long clock_event_ns(void);       /* when the card will have done all that was launched so far */
void clock_wait(void);                /* the host waits for the card */
void clock_passes(const char *kind);  /* an entry of the journal */
