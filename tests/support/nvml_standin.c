/* A stand-in for libnvidia-ml.so.1: the corner of NVML that hfopt uses, answering from a text file that may change while it is in use.
 *
 * HFOPT_NVML_STANDIN names the file. Each line is "key value"; a device's keys are "<index>.<key>", a MIG instance's "<index>/<number>.<key>",
 * and "*.<key>" holds for every whole card. A key that is absent is "not supported". A value of several numbers ("10 50 90") gives the next one
 * at each call and stays at the last. "<device>.lost_after 40" makes the card fall off the bus after 40 calls on it, "<device>.lost 1" at once.
 * Compiled with -DOLD_DRIVER it lacks the functions that came with later drivers.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, LOST = 15, UNKNOWN = 999 };
enum { CARDS = 64, INSTANCES = 8, COUNTERS = 1024 };

typedef struct { int card, instance; } handle; /* instance -1: the whole card */
static handle handles[CARDS][INSTANCES + 1];
static long calls[CARDS];
static int initialised;
static struct { char key[64]; long count; } counters[COUNTERS];

static int look_up(const char *key, char *value, size_t size)
{
    const char *path = getenv("HFOPT_NVML_STANDIN");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    size_t length = strlen(key);
    int found = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) || line[length] != ' ') continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(value, size, "%s", line + length + 1);
        found = 1;
    }
    if (file) fclose(file);
    return found;
}

static long next_count(const char *key)
{
    for (int i = 0; i < COUNTERS; i++) {
        if (!counters[i].key[0]) snprintf(counters[i].key, sizeof counters[i].key, "%s", key);
        if (!strcmp(counters[i].key, key)) return counters[i].count++;
    }
    return 0;
}

static int device_text(const handle *device, const char *key, char *value, size_t size)
{
    char full[64];
    if (device->instance < 0) snprintf(full, sizeof full, "%d.%s", device->card, key);
    else snprintf(full, sizeof full, "%d/%d.%s", device->card, device->instance, key);
    if (look_up(full, value, size)) return 1;
    if (device->instance >= 0) return 0;
    snprintf(full, sizeof full, "*.%s", key);
    return look_up(full, value, size);
}

static int device_number(const handle *device, const char *key, unsigned long long *number)
{
    char value[256], counter[64], *place = value, *end;
    if (!device_text(device, key, value, sizeof value)) return 0;
    snprintf(counter, sizeof counter, "%d/%d.%s", device->card, device->instance, key);
    long skip = strchr(value, ' ') ? next_count(counter) : 0;
    *number = strtoull(place, &end, 0);
    while (skip-- > 0 && *end) {
        place = end;
        unsigned long long next = strtoull(place, &end, 0);
        if (end == place) break;
        *number = next;
    }
    return 1;
}

static long setting(const char *key, long otherwise)
{
    char value[256];
    return look_up(key, value, sizeof value) ? strtol(value, NULL, 0) : otherwise;
}

API void nvml_standin_restart(void)
{
    initialised = 0;
    memset(calls, 0, sizeof calls);
    memset(counters, 0, sizeof counters);
}

static int alive(const handle *device)
{
    unsigned long long limit;
    if (!initialised) return UNINITIALIZED;
    long call = calls[device->card]++;
    if (device_number(&handles[device->card][0], "lost", &limit) && limit) return LOST;
    if (device_number(&handles[device->card][0], "lost_after", &limit) && call >= (long)limit) return LOST;
    return SUCCESS;
}

static int answer(const handle *device, const char *key, unsigned long long *number)
{
    int state = alive(device);
    return state ? state : device_number(device, key, number) ? SUCCESS : NOT_SUPPORTED;
}

static int answer_unsigned(const handle *device, const char *key, unsigned *number)
{
    unsigned long long wide = 0;
    int state = answer(device, key, &wide);
    *number = (unsigned)wide;
    return state;
}

static int answer_text(const handle *device, const char *key, char *text, unsigned size)
{
    int state = alive(device);
    return state ? state : device_text(device, key, text, size) ? SUCCESS : NOT_SUPPORTED;
}

API int nvmlInitWithFlags(unsigned flags)
{
    int state = (int)setting("init", SUCCESS);
    (void)flags;
    for (int card = 0; card < CARDS; card++)
        for (int instance = 0; instance <= INSTANCES; instance++) handles[card][instance] = (handle){ card, instance - 1 };
    if (state == SUCCESS) initialised++;
    return state;
}
API int nvmlInit(void) { return nvmlInitWithFlags(0); }
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlShutdown(void) { return initialised ? (initialised--, SUCCESS) : UNINITIALIZED; }
API const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "stand-in error"; }

API int nvmlSystemGetDriverVersion(char *text, unsigned size) { return look_up("driver", text, size) ? SUCCESS : NOT_SUPPORTED; }
API int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = (int)setting("cuda", 0);
    return *version ? SUCCESS : NOT_SUPPORTED;
}
API int nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)setting("count", 0);
    return initialised ? SUCCESS : UNINITIALIZED;
}
API int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle **device)
{
    if (index >= (unsigned)setting("count", 0)) return INVALID;
    *device = &handles[index][0];
    return alive(*device);
}
API int nvmlDeviceGetName(handle *d, char *text, unsigned size) { return answer_text(d, "name", text, size); }
API int nvmlDeviceGetUUID(handle *d, char *text, unsigned size) { return answer_text(d, "uuid", text, size); }

typedef struct { unsigned long long total, free, used; } memory_v1;
API int nvmlDeviceGetMemoryInfo(handle *d, memory_v1 *memory)
{
    unsigned long long total = 0, used = 0, reserved = 0;
    int state = answer(d, "total_mib", &total);
    if (state) return state;
    device_number(d, "used_mib", &used);
    device_number(d, "reserved_mib", &reserved);
    *memory = (memory_v1){ total << 20, (total - used - reserved) << 20, (used + reserved) << 20 };
    return SUCCESS;
}
#ifndef OLD_DRIVER
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
API int nvmlDeviceGetMemoryInfo_v2(handle *d, memory_v2 *memory)
{
    unsigned long long total = 0, used = 0, reserved = 0;
    int state = memory->version == (sizeof(memory_v2) | 2u << 24) ? answer(d, "total_mib", &total) : INVALID;
    if (state) return state;
    device_number(d, "used_mib", &used);
    device_number(d, "reserved_mib", &reserved);
    memory->total = total << 20, memory->reserved = reserved << 20, memory->used = used << 20;
    memory->free = (total - used - reserved) << 20;
    return SUCCESS;
}
API int nvmlDeviceGetNumGpuCores(handle *d, unsigned *n) { return answer_unsigned(d, "cores", n); }
API int nvmlDeviceGetMemoryBusWidth(handle *d, unsigned *n) { return answer_unsigned(d, "bus_bits", n); }
API int nvmlDeviceGetCurrentClocksEventReasons(handle *d, unsigned long long *n) { return answer(d, "throttle", n); }
#endif
API int nvmlDeviceGetCurrentClocksThrottleReasons(handle *d, unsigned long long *n) { return answer(d, "throttle", n); }

API int nvmlDeviceGetCudaComputeCapability(handle *d, int *major, int *minor)
{
    unsigned long long both = 0; /* 86 is 8.6, 120 is 12.0 */
    int state = answer(d, "capability", &both);
    *major = (int)(both / 10), *minor = (int)(both % 10);
    return state;
}
API int nvmlDeviceGetUtilizationRates(handle *d, unsigned *rates)
{
    int state = answer_unsigned(d, "util", &rates[0]);
    if (!state) answer_unsigned(d, "memory_util", &rates[1]);
    return state;
}
API int nvmlDeviceGetPowerUsage(handle *d, unsigned *mw) { return answer_unsigned(d, "power_mw", mw); }
API int nvmlDeviceGetEnforcedPowerLimit(handle *d, unsigned *mw) { return answer_unsigned(d, "power_limit_mw", mw); }
API int nvmlDeviceGetTotalEnergyConsumption(handle *d, unsigned long long *mj) { return answer(d, "energy_mj", mj); }
API int nvmlDeviceGetTemperature(handle *d, int sensor, unsigned *c) { return sensor ? INVALID : answer_unsigned(d, "temperature", c); }
API int nvmlDeviceGetClockInfo(handle *d, int kind, unsigned *mhz) { return answer_unsigned(d, kind == 1 ? "sm_mhz" : "memory_mhz", mhz); }
API int nvmlDeviceGetMaxClockInfo(handle *d, int kind, unsigned *mhz) { return answer_unsigned(d, kind == 1 ? "max_sm_mhz" : "max_memory_mhz", mhz); }
API int nvmlDeviceGetMaxPcieLinkGeneration(handle *d, unsigned *n) { return answer_unsigned(d, "pcie_generation", n); }
API int nvmlDeviceGetCurrPcieLinkWidth(handle *d, unsigned *n) { return answer_unsigned(d, "pcie_lanes", n); }
API int nvmlDeviceGetMaxPcieLinkWidth(handle *d, unsigned *n) { return answer_unsigned(d, "pcie_max_lanes", n); }
API int nvmlDeviceGetPcieThroughput(handle *d, int way, unsigned *kb) { return answer_unsigned(d, way ? "pcie_rx_kb" : "pcie_tx_kb", kb); }
API int nvmlDeviceGetNvLinkState(handle *d, unsigned link, unsigned *active)
{
    unsigned links = 0;
    int state = answer_unsigned(d, "nvlinks", &links);
    *active = link < links;
    return state;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;
static int processes(handle *d, unsigned *count, process *list)
{
    char text[256] = ""; /* "pid:mib pid:mib"; a pid alone: the driver does not say how much */
    unsigned number = 0, room = list ? *count : 0;
    int state = alive(d);
    if (state) return state;
    if (!device_text(d, "processes", text, sizeof text)) return NOT_SUPPORTED;
    for (char *rest = text, *word; (word = strtok_r(rest, " ", &rest)); number++) {
        char *mib = strchr(word, ':');
        if (number < room)
            list[number] = (process){ (unsigned)strtoul(word, NULL, 0), mib ? strtoull(mib + 1, NULL, 0) << 20 : ~0ull, ~0u, ~0u };
    }
    *count = number;
    return number > room ? TOO_SMALL : SUCCESS;
}
#ifndef OLD_DRIVER
API int nvmlDeviceGetComputeRunningProcesses_v3(handle *d, unsigned *count, process *list) { return processes(d, count, list); }
#endif
API int nvmlDeviceGetComputeRunningProcesses_v2(handle *d, unsigned *count, process *list) { return processes(d, count, list); }

API int nvmlDeviceGetMigMode(handle *d, unsigned *now, unsigned *pending)
{
    int state = answer_unsigned(d, "mig", now);
    *pending = *now;
    return state;
}
API int nvmlDeviceGetMaxMigDeviceCount(handle *d, unsigned *count)
{
    *count = INSTANCES - 1;
    return alive(d);
}
API int nvmlDeviceGetMigDeviceHandleByIndex(handle *d, unsigned index, handle **instance)
{
    char text[128];
    *instance = &handles[d->card][index + 1];
    return device_text(*instance, "uuid", text, sizeof text) ? SUCCESS : NOT_FOUND;
}
API int nvmlDeviceGetGpuInstanceId(handle *d, unsigned *id) { return answer_unsigned(d, "gpu_instance", id); }
API int nvmlDeviceGetComputeInstanceId(handle *d, unsigned *id) { return answer_unsigned(d, "compute_instance", id); }

typedef struct { unsigned sms, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices; unsigned long long memory_mb; } attributes;
API int nvmlDeviceGetAttributes_v2(handle *d, attributes *found)
{
    unsigned long long sms = 0, memory = 0;
    int state = d->instance < 0 ? NOT_SUPPORTED : answer(d, "sms", &sms);
    device_number(d, "total_mib", &memory);
    *found = (attributes){ .sms = (unsigned)sms, .memory_mb = memory };
    return state;
}
