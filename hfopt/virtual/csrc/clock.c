/*
 * The clock of a timed rehearsal: it says what the script's own clock would say on the card.
 *
 * It runs with the real one until it is held: then only the steps move it, and what the script sleeps. A step's times come from hfopt
 * (hfopt_clock_follow): for each launch, by its phase and its place in it, when the host had issued it and when the card was done. A
 * reading moves a held clock by a microsecond, so that no two are equal and a loop that waits for a time to pass ends. It never goes back.
 */
#define _GNU_SOURCE
#include "clock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "card.h"

#define READING_NS 1000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int held, visit, place;
static long long ahead_ns, last_ns, held_since_ns, step_began_ns;
/* by visit: where its times begin; pairs of (host, card), in ns since the step began */
static int visits, *first;
static long long *times, step_ns;

static long long real_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}
/* of the launches so far: 0 the host, 1 the card */
static long long reached_ns(int which)
{
    if (!visits) return step_began_ns;
    int v = visit < visits ? visit : visits - 1, room = first[v + 1] - first[v];
    int at = visit < visits && place < room ? place : room - 1;
    return step_began_ns + times[2 * (first[v] + at) + which];
}
static void at_least(long long ns)
{
    if (ns > last_ns) last_ns = ns;
}
static long long read_ns(int step)
{
    if (!held) return real_ns() + ahead_ns;
    last_ns += step;
    at_least(reached_ns(0));
    return last_ns;
}
static long long locked(long long (*what)(int), int value)
{
    pthread_mutex_lock(&lock);
    long long found = what(value);
    pthread_mutex_unlock(&lock);
    return found;
}
static long long card_ns(int unused)
{
    long long host = read_ns(unused), done = held ? reached_ns(1) : 0;
    return done > host ? done : host;
}
static long long wait_ns(int unused)
{
    (void)unused;
    if (held) at_least(reached_ns(1));
    return 0;
}

long long clock_ns(void) { return locked(read_ns, READING_NS); }
long long clock_event_ns(void) { return locked(card_ns, 0); }
void clock_wait(void) { locked(wait_ns, 0); }
void clock_passes(const char *kind)
{
    if (!strcmp(kind, "sync")) {
        clock_wait();
        return;
    }
    if (!strcmp(kind, "step")) {
        visit = place = 0;
    } else if (!strcmp(kind, "phase")) {
        visit++;
        place = 0;
    } else if (!strcmp(kind, "kernel") || !strcmp(kind, "gemm") || !strcmp(kind, "library") || !strcmp(kind, "copy") ||
               !strcmp(kind, "fill") || !strcmp(kind, "nccl")) {
        place++;
    }
}

/* called by Python */
API long long hfopt_clock_ns(void) { return clock_ns(); }
/* from now on the steps alone move it */
API void hfopt_clock_hold(void)
{
    pthread_mutex_lock(&lock);
    if (!held) {
        held_since_ns = real_ns();
        last_ns = step_began_ns = held_since_ns + ahead_ns;
        held = 1;
    }
    pthread_mutex_unlock(&lock);
}
/* it runs again; `as_real`: as if it had never been held, where that is later */
API void hfopt_clock_run(int as_real)
{
    pthread_mutex_lock(&lock);
    if (held) {
        long long real = real_ns();
        if (as_real) at_least(real + ahead_ns);
        ahead_ns = last_ns - real;
        held = 0;
    }
    pthread_mutex_unlock(&lock);
}
/* the times of a step: `starts` has one more than there are visits */
API void hfopt_clock_follow(int count, const int *starts, const long long *found, long long length_ns)
{
    pthread_mutex_lock(&lock);
    free(first);
    free(times);
    first = malloc((count + 1) * sizeof *first);
    memcpy(first, starts, (count + 1) * sizeof *first);
    times = malloc(2 * (size_t)starts[count] * sizeof *times);
    memcpy(times, found, 2 * (size_t)starts[count] * sizeof *times);
    visits = count;
    step_ns = length_ns;
    pthread_mutex_unlock(&lock);
}
/* that many steps are over */
API void hfopt_clock_steps(long long count)
{
    pthread_mutex_lock(&lock);
    if (held && count > 0) {
        step_began_ns += count * step_ns;
        at_least(step_began_ns);
    }
    pthread_mutex_unlock(&lock);
}
API void hfopt_clock_sleep(long long ns)
{
    pthread_mutex_lock(&lock);
    if (held) {
        step_began_ns += ns;
        at_least(last_ns + ns);
    }
    pthread_mutex_unlock(&lock);
}
/* a forked child has the clock as it stood, and it runs */
API void hfopt_clock_forked(void)
{
    pthread_mutex_init(&lock, NULL);
    hfopt_clock_run(0);
}
