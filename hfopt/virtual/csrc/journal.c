/*
 * The journal: launches, matrix products, copies, waits and collectives, in order, with the host's time at each.
 *
 * HFOPT_VIRTUAL_JOURNAL names the folder; each process writes its own file there while Python has the recording on
 * (hfopt_rehearsal_journal). A line is: kind, the thread (0: the main one) and its CPU time in ns, the operation the launch belongs to
 * (0: none), the stream, and what the kind has to say, all separated by tabs. `hfopt.virtual.launch_journal` reads it.
 */
#define _GNU_SOURCE
#include "journal.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "card.h"
#include "clock.h"

static FILE *out;
static int recording;
static pid_t owner;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned last_operation;
static __thread unsigned operation;
static __thread long long aside_ns, paused_ns;

static const char *folder(void)
{
    static const char *name;
    static int asked;
    if (!asked) {
        name = getenv("HFOPT_VIRTUAL_JOURNAL");
        asked = 1;
    }
    return name && *name ? name : NULL;
}
static long long used_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (long long)t.tv_sec * 1000000000 + t.tv_nsec;
}
/* a forked child shares the file's position, not the story */
int journal_on(void) { return recording && owner == getpid(); }

static void write_line(const char *kind, const void *stream, const char *format, va_list values)
{
    static __thread int thread = -1;
    if (thread < 0) thread = syscall(SYS_gettid) == owner ? 0 : (int)syscall(SYS_gettid);
    fprintf(out, "%s\t%d\t%lld\t%u\t%llx\t", kind, thread, used_ns() - aside_ns, operation, (unsigned long long)(uintptr_t)stream);
    vfprintf(out, format, values);
    fputc('\n', out);
}
void journal(const char *kind, const void *stream, const char *format, ...)
{
    va_list values;
    if (!journal_on()) return;
    va_start(values, format);
    pthread_mutex_lock(&lock);
    write_line(kind, stream, format, values);
    clock_passes(kind);
    pthread_mutex_unlock(&lock);
    va_end(values);
}
static int open_file(void)
{
    char name[4096];
    if (out && owner == getpid()) return 1;
    if (!folder()) return 0;
    snprintf(name, sizeof name, "%s/journal-%d.tsv", folder(), getpid());
    out = fopen(name, "w");
    if (!out) return 0;
    setvbuf(out, NULL, _IOFBF, 1 << 20);
    owner = getpid();
    return 1;
}
/* called by Python */
API int hfopt_journal_record(int on)
{
    recording = open_file() && on;
    if (!on && out && owner == getpid()) fflush(out);
    return recording;
}
API void hfopt_journal_flush(void)
{
    if (journal_on()) fflush(out);
}
API void hfopt_journal_note(const char *kind, const char *text) { journal(kind, NULL, "%s", text); }
API void hfopt_journal_operation(void) { operation = __atomic_add_fetch(&last_operation, 1, __ATOMIC_RELAXED); }
API void hfopt_journal_operation_end(const char *text)
{
    if (text) journal("op", NULL, "%s", text);
    operation = 0;
}
/* what hfopt itself does in the process is no time of the script's */
API void hfopt_journal_pause(void) { paused_ns = used_ns(); }
API void hfopt_journal_resume(void) { aside_ns += used_ns() - paused_ns; }

/* names by the address of the kernel's stub on the host: open addressing */
typedef struct { const void *kernel; const char *name; unsigned number; } entry;
static entry *table;
static size_t size, used;
static unsigned last_number;

static entry *find(entry *in, size_t room, const void *kernel)
{
    size_t i = ((uintptr_t)kernel * 0x9E3779B97F4A7C15ull >> 20) & (room - 1);
    while (in[i].kernel && in[i].kernel != kernel) i = (i + 1) & (room - 1);
    return &in[i];
}
void journal_register(const void *kernel, const char *name)
{
    if (!folder()) return;
    pthread_mutex_lock(&lock);
    if (2 * used >= size) {
        size_t room = size ? 2 * size : 1 << 16;
        entry *grown = calloc(room, sizeof *grown);
        for (size_t i = 0; i < size; i++)
            if (table[i].kernel) *find(grown, room, table[i].kernel) = table[i];
        free(table);
        table = grown;
        size = room;
    }
    entry *e = find(table, size, kernel);
    used += !e->kernel;
    *e = (entry){kernel, name, 0};
    pthread_mutex_unlock(&lock);
}
unsigned journal_kernel(const void *kernel)
{
    if (!size) return 0;
    entry *e = find(table, size, kernel);
    if (!e->kernel) return 0;
    if (!e->number) {
        e->number = ++last_number;
        journal("name", NULL, "%u\t%s", e->number, e->name);
    }
    return e->number;
}
