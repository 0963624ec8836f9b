/*
 * The board: a small file mapped by every process of one launch (CUDA side and NVML side alike).
 *
 * A process has one entry with its bytes per card. Changes happen under flock, which the kernel releases when a
 * process dies; the entries of dead processes are dropped by whoever looks next, as the driver would free their memory.
 */
#define _GNU_SOURCE
#include "board.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "card.h"

#define MAX_PROCESSES 128
#define TICK_MS 16
#define TICKS 64 /* about one second, NVML's own sampling period on most cards */

typedef struct {
    int pid;
    unsigned attached; /* bit per device: the context is charged */
    uint64_t bytes[MAX_DEVICES];
    uint64_t last_tick[MAX_DEVICES]; /* when this process last ran a kernel there */
} entry;

typedef struct {
    entry entries[MAX_PROCESSES];
    uint64_t ticks[MAX_DEVICES][TICKS]; /* ring: the tick in which a kernel last ran */
    uint64_t launches[MAX_DEVICES];
} board_state;

static board_state *state;
static int lock_fd = -1;
static entry *mine;
static int forked;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t thread_lock = PTHREAD_MUTEX_INITIALIZER;

static void after_fork(void)
{
    if (mine) forked = 1; /* CUDA does not survive a fork once it was used */
    mine = NULL;
    pthread_mutex_init(&thread_lock, NULL);
}

static void open_board(void)
{
    const char *name = getenv("HFOPT_VIRTUAL_STATE");
    void *p = MAP_FAILED;
    if (name && *name) {
        lock_fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (lock_fd >= 0 && !ftruncate(lock_fd, sizeof *state))
            p = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, lock_fd, 0);
    }
    if (p == MAP_FAILED) p = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    state = p == MAP_FAILED ? calloc(1, sizeof *state) : p;
    pthread_atfork(NULL, NULL, after_fork);
}

static void enter(void)
{
    pthread_once(&once, open_board);
    pthread_mutex_lock(&thread_lock);
    if (lock_fd >= 0)
        while (flock(lock_fd, LOCK_EX) && errno == EINTR) {}
}
static void leave(void)
{
    if (lock_fd >= 0) flock(lock_fd, LOCK_UN);
    pthread_mutex_unlock(&thread_lock);
}

static void drop_the_dead(void)
{
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (state->entries[i].pid && kill(state->entries[i].pid, 0) && errno == ESRCH) memset(&state->entries[i], 0, sizeof(entry));
}

static entry *my_entry(void)
{
    if (mine) return mine;
    drop_the_dead();
    for (int i = 0; i < MAX_PROCESSES && !mine; i++)
        if (state->entries[i].pid == getpid()) mine = &state->entries[i];
    for (int i = 0; i < MAX_PROCESSES && !mine; i++)
        if (!state->entries[i].pid) {
            mine = &state->entries[i];
            mine->pid = getpid();
        }
    return mine;
}

static uint64_t total(int device)
{
    uint64_t sum = 0;
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (state->entries[i].pid) sum += state->entries[i].bytes[device];
    return sum;
}

static int take(entry *own, int device, size_t bytes)
{
    if (total(device) + bytes > card()->usable_bytes) {
        drop_the_dead();
        if (total(device) + bytes > card()->usable_bytes) return 0;
    }
    own->bytes[device] += bytes;
    return 1;
}

static int attach(entry *own, int device)
{
    if (own->attached & 1u << device) return 1;
    if (!take(own, device, card()->context_bytes)) return 0;
    own->attached |= 1u << device;
    return 1;
}

int board_attach(int device)
{
    enter();
    entry *own = my_entry();
    int ok = own && attach(own, device);
    leave();
    return ok;
}

int board_charge(int device, size_t bytes)
{
    enter();
    entry *own = my_entry();
    int ok = own && attach(own, device) && take(own, device, bytes);
    leave();
    return ok;
}

void board_release(int device, size_t bytes)
{
    if (forked) return;
    enter();
    entry *own = my_entry();
    if (own) own->bytes[device] -= bytes < own->bytes[device] ? bytes : own->bytes[device];
    leave();
}

int board_forked(void) { return forked; }

static uint64_t now_tick(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return ((uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000) / TICK_MS;
}

void board_launched(int device)
{
    if (!mine || !(mine->attached & 1u << device)) board_attach(device);
    uint64_t tick = now_tick();
    __atomic_add_fetch(&state->launches[device], 1, __ATOMIC_RELAXED);
    __atomic_store_n(&state->ticks[device][tick % TICKS], tick, __ATOMIC_RELAXED);
    if (mine) mine->last_tick[device] = tick;
}

unsigned board_utilization_percent(int device)
{
    unsigned busy = 0;
    pthread_once(&once, open_board);
    uint64_t now = now_tick();
    for (int i = 0; i < TICKS; i++) {
        uint64_t tick = __atomic_load_n(&state->ticks[device][i], __ATOMIC_RELAXED);
        busy += tick && tick <= now && now - tick < TICKS;
    }
    return busy * 100 / TICKS;
}

uint64_t board_launches(int device)
{
    pthread_once(&once, open_board);
    return __atomic_load_n(&state->launches[device], __ATOMIC_RELAXED);
}

uint64_t board_used(int device)
{
    enter();
    drop_the_dead();
    uint64_t sum = total(device);
    leave();
    return sum;
}

int board_processes(int device, board_process *out, int room)
{
    int n = 0;
    unsigned busy = board_utilization_percent(device);
    uint64_t now = now_tick();
    enter();
    drop_the_dead();
    for (int i = 0; i < MAX_PROCESSES; i++) {
        const entry *e = &state->entries[i];
        if (!e->pid || !(e->attached & 1u << device)) continue;
        if (n < room) out[n] = (board_process){e->pid, e->bytes[device], now - e->last_tick[device] < TICKS ? busy : 0};
        n++;
    }
    leave();
    return n;
}

__attribute__((destructor)) static void say_goodbye(void)
{
    if (!mine || forked) return;
    enter();
    memset(mine, 0, sizeof *mine);
    mine = NULL;
    leave();
}
