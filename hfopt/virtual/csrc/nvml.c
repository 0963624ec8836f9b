/*
 * NVML for the same card: identity and memory from the board, load and what follows from it (power, temperature,
 * clocks) derived from when kernels ran. Linked as a library of its own, named libnvidia-ml.so.1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "board.h"
#include "card.h"

#define DRIVER_VERSION "580.82.07" /* of the branch that brings CUDA 13 */

enum {
    SUCCESS = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
};
enum { IDLE_WATTS_SHARE = 12, BUSY_WATTS_SHARE = 88 }; /* percent of the limit */
enum { IDLE_CELSIUS = 34, BUSY_CELSIUS = 68, SLOWDOWN_CELSIUS = 92, SHUTDOWN_CELSIUS = 97 };
enum { IDLE_SM_MHZ = 210, BUSY_SM_MHZ = 1410, MEMORY_MHZ = 5001 };

#define HANDLE(i) ((void *)(uintptr_t)((i) + 1))
#define DEVICE(handle) ((int)(uintptr_t)(handle)-1)
#define CHECK(handle) do { if (DEVICE(handle) < 0 || DEVICE(handle) >= card()->physical) return INVALID_ARGUMENT; } while (0)

static int put(char *out, unsigned room, const char *text)
{
    if (strlen(text) + 1 > room) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}
static unsigned between(unsigned idle, unsigned busy, int device)
{
    return idle + (busy - idle) * board_utilization_percent(device) / 100;
}

/* --- library and driver */

API int nvmlInit(void) { return SUCCESS; }
API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
API int nvmlShutdown(void) { return SUCCESS; }
API const char *nvmlErrorString(int code)
{
    switch (code) {
    case SUCCESS: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    default: return "Unknown Error";
    }
}
API int nvmlSystemGetDriverVersion(char *out, unsigned room) { return put(out, room, DRIVER_VERSION); }
API int nvmlSystemGetNVMLVersion(char *out, unsigned room) { return put(out, room, "13." DRIVER_VERSION); }
API int nvmlSystemGetCudaDriverVersion(int *v) { *v = CUDART_VERSION; return SUCCESS; }
API int nvmlSystemGetCudaDriverVersion_v2(int *v) { return nvmlSystemGetCudaDriverVersion(v); }

/* --- which cards there are */

API int nvmlDeviceGetCount(unsigned *n) { *n = (unsigned)card()->physical; return SUCCESS; }
API int nvmlDeviceGetCount_v2(unsigned *n) { return nvmlDeviceGetCount(n); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d)
{
    *d = HANDLE(i);
    CHECK(*d);
    return SUCCESS;
}
API int nvmlDeviceGetHandleByIndex(unsigned i, void **d) { return nvmlDeviceGetHandleByIndex_v2(i, d); }
API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **d)
{
    unsigned domain, id;
    if (sscanf(bus, "%x:%x", &domain, &id) != 2) return INVALID_ARGUMENT;
    *d = HANDLE((int)id - 1);
    if (!id || (int)id > card()->physical) return NOT_FOUND;
    return SUCCESS;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, void **d)
{
    char text[41];
    for (int i = 0; i < card()->physical; i++) {
        card_uuid_text(i, text);
        if (!strcmp(text, uuid)) {
            *d = HANDLE(i);
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
API int nvmlDeviceGetIndex(void *d, unsigned *i) { CHECK(d); *i = (unsigned)DEVICE(d); return SUCCESS; }
API int nvmlDeviceGetMinorNumber(void *d, unsigned *i) { return nvmlDeviceGetIndex(d, i); }
API int nvmlDeviceGetName(void *d, char *out, unsigned room) { CHECK(d); return put(out, room, card()->name); }
API int nvmlDeviceGetUUID(void *d, char *out, unsigned room)
{
    char text[41];
    CHECK(d);
    card_uuid_text(DEVICE(d), text);
    return put(out, room, text);
}
typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, id, subsystem_id;
    char bus_id[32];
} pci_info;
API int nvmlDeviceGetPciInfo_v3(void *d, pci_info *out)
{
    CHECK(d);
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)DEVICE(d) + 1;
    snprintf(out->legacy_bus_id, sizeof out->legacy_bus_id, "0000:%02X:00.0", out->bus);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return SUCCESS;
}
API int nvmlDeviceGetPciInfo_v2(void *d, pci_info *out) { return nvmlDeviceGetPciInfo_v3(d, out); }
API int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor)
{
    CHECK(d);
    *major = card()->major;
    *minor = card()->minor;
    return SUCCESS;
}

/* --- memory and processes */

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;

/* Version 1 counts the driver's own part as used, version 2 says it apart. */
API int nvmlDeviceGetMemoryInfo_v2(void *d, memory_v2 *out)
{
    CHECK(d);
    out->total = card()->memory_bytes;
    out->reserved = card()->memory_bytes - card()->usable_bytes;
    out->used = board_used(DEVICE(d));
    out->free = out->reserved + out->used < out->total ? out->total - out->reserved - out->used : 0;
    return SUCCESS;
}
API int nvmlDeviceGetMemoryInfo(void *d, memory_v1 *out)
{
    memory_v2 v2;
    int result = nvmlDeviceGetMemoryInfo_v2(d, &v2);
    if (result == SUCCESS) *out = (memory_v1){v2.total, v2.free, v2.reserved + v2.used};
    return result;
}

typedef struct { unsigned pid; unsigned long long memory; } process_v1;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_v2;
typedef struct { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; } process_load;
enum { MOST_PROCESSES = 128 };

static int list(void *d, unsigned *n, board_process *found)
{
    unsigned room = *n;
    CHECK(d);
    *n = (unsigned)board_processes(DEVICE(d), found, MOST_PROCESSES);
    return *n > room ? INSUFFICIENT_SIZE : SUCCESS;
}
API int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, process_v1 *out)
{
    board_process found[MOST_PROCESSES];
    int result = list(d, n, found);
    for (unsigned i = 0; result == SUCCESS && i < *n; i++) out[i] = (process_v1){(unsigned)found[i].pid, found[i].bytes};
    return result;
}
API int nvmlDeviceGetComputeRunningProcesses_v2(void *d, unsigned *n, process_v2 *out)
{
    board_process found[MOST_PROCESSES];
    int result = list(d, n, found);
    for (unsigned i = 0; result == SUCCESS && i < *n; i++)
        out[i] = (process_v2){(unsigned)found[i].pid, found[i].bytes, 0xffffffffu, 0xffffffffu};
    return result;
}
API int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, process_v2 *out)
{
    return nvmlDeviceGetComputeRunningProcesses_v2(d, n, out);
}
API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *n, void *out) { (void)out; CHECK(d); *n = 0; return SUCCESS; }
API int nvmlDeviceGetGraphicsRunningProcesses_v2(void *d, unsigned *n, void *out) { (void)out; CHECK(d); *n = 0; return SUCCESS; }
API int nvmlDeviceGetProcessUtilization(void *d, process_load *out, unsigned *n, unsigned long long since_us)
{
    board_process found[MOST_PROCESSES];
    struct timespec now;
    (void)since_us;
    clock_gettime(CLOCK_REALTIME, &now);
    int result = list(d, n, found);
    for (unsigned i = 0; result == SUCCESS && out && i < *n; i++)
        out[i] = (process_load){(unsigned)found[i].pid, (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000,
                                found[i].utilization_percent, found[i].utilization_percent / 2, 0, 0};
    return result;
}

/* --- load, power, heat, clocks */

API int nvmlDeviceGetUtilizationRates(void *d, unsigned out[2])
{
    CHECK(d);
    out[0] = board_utilization_percent(DEVICE(d));
    out[1] = out[0] / 2;
    return SUCCESS;
}
API int nvmlDeviceGetPowerManagementLimit(void *d, unsigned *mw) { CHECK(d); *mw = (unsigned)card()->power_limit_w * 1000; return SUCCESS; }
API int nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *mw) { return nvmlDeviceGetPowerManagementLimit(d, mw); }
API int nvmlDeviceGetPowerManagementDefaultLimit(void *d, unsigned *mw) { return nvmlDeviceGetPowerManagementLimit(d, mw); }
API int nvmlDeviceGetPowerUsage(void *d, unsigned *mw)
{
    CHECK(d);
    *mw = (unsigned)card()->power_limit_w * 10 * between(IDLE_WATTS_SHARE, BUSY_WATTS_SHARE, DEVICE(d));
    return SUCCESS;
}
API int nvmlDeviceGetTemperature(void *d, int sensor, unsigned *c)
{
    (void)sensor;
    CHECK(d);
    *c = between(IDLE_CELSIUS, BUSY_CELSIUS, DEVICE(d));
    return SUCCESS;
}
typedef struct { unsigned version; int sensor, celsius; } temperature_v1;
API int nvmlDeviceGetTemperatureV(void *d, temperature_v1 *out)
{
    CHECK(d);
    out->celsius = (int)between(IDLE_CELSIUS, BUSY_CELSIUS, DEVICE(d));
    return SUCCESS;
}
API int nvmlDeviceGetTemperatureThreshold(void *d, int which, unsigned *c)
{
    CHECK(d);
    *c = which == 0 ? SHUTDOWN_CELSIUS : SLOWDOWN_CELSIUS;
    return SUCCESS;
}
API int nvmlDeviceGetClockInfo(void *d, int clock, unsigned *mhz)
{
    CHECK(d);
    *mhz = clock == 2 ? MEMORY_MHZ : board_utilization_percent(DEVICE(d)) ? BUSY_SM_MHZ : IDLE_SM_MHZ;
    return SUCCESS;
}
API int nvmlDeviceGetMaxClockInfo(void *d, int clock, unsigned *mhz) { CHECK(d); *mhz = clock == 2 ? MEMORY_MHZ : BUSY_SM_MHZ; return SUCCESS; }
API int nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *reasons)
{
    CHECK(d);
    *reasons = board_utilization_percent(DEVICE(d)) ? 0 : 1; /* 1: idle */
    return SUCCESS;
}
API int nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *r) { return nvmlDeviceGetCurrentClocksThrottleReasons(d, r); }
API int nvmlDeviceGetPerformanceState(void *d, int *p) { CHECK(d); *p = board_utilization_percent(DEVICE(d)) ? 0 : 8; return SUCCESS; }

/* --- what callers look up and take "no" or a plain value for */

API int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *next) { (void)now; (void)next; CHECK(d); return NOT_SUPPORTED; }
API int nvmlDeviceGetComputeMode(void *d, int *mode) { CHECK(d); *mode = 0; return SUCCESS; }
API int nvmlDeviceGetPcieThroughput(void *d, int counter, unsigned *kb) { (void)counter; CHECK(d); *kb = 0; return SUCCESS; }
API int nvmlDeviceGetNvLinkState(void) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
API int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
