/* The card this process sees, and what CUDA_VISIBLE_DEVICES leaves of it. */
#include "card.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static card_facts facts;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static long long env_number(const char *name, long long fallback)
{
    const char *s = getenv(name);
    return s && *s ? strtoll(s, NULL, 10) : fallback;
}

/* FNV-1a over the name, then mixed with the index: the same card has the same UUID in every process. */
static void make_uuid(int physical, unsigned char uuid[16])
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *s = facts.name; *s; s++) hash = (hash ^ (unsigned char)*s) * 0x100000001b3u;
    for (int half = 0; half < 2; half++) {
        hash = (hash ^ (uint64_t)(physical + 1)) * 0x100000001b3u;
        hash ^= hash >> 29;
        memcpy(uuid + 8 * half, &hash, 8);
    }
    uuid[6] = (unsigned char)((uuid[6] & 0x0f) | 0x40);
    uuid[8] = (unsigned char)((uuid[8] & 0x3f) | 0x80);
}

static void make_uuid_text(int physical, char text[41])
{
    unsigned char u[16];
    make_uuid(physical, u);
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3],
             u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

static int device_named(const char *item, size_t length)
{
    char text[41], *end;
    if (length > 4 && !strncmp(item, "GPU-", 4)) {
        for (int i = 0; i < facts.physical; i++) {
            make_uuid_text(i, text);
            if (length < sizeof text && !strncmp(item, text, length)) return i;
        }
        return -1;
    }
    long index = strtol(item, &end, 10);
    return end == item || index < 0 || index >= facts.physical ? -1 : (int)index;
}

/* As the driver does: the list ends at the first entry that names no device, and a device named twice leaves none. */
static void find_visible(void)
{
    const char *s = getenv("CUDA_VISIBLE_DEVICES");
    facts.visible = 0;
    if (!s) {
        for (int i = 0; i < facts.physical; i++) facts.physical_of[facts.visible++] = i;
        return;
    }
    while (*s && facts.visible < MAX_DEVICES) {
        while (*s == ' ') s++;
        size_t length = strcspn(s, ", ");
        int device = device_named(s, length);
        if (device < 0) return;
        for (int i = 0; i < facts.visible; i++)
            if (facts.physical_of[i] == device) {
                facts.visible = 0;
                return;
            }
        facts.physical_of[facts.visible++] = device;
        s += strcspn(s, ",");
        if (*s == ',') s++;
    }
}

static void read_environment(void)
{
    const char *name = getenv("HFOPT_VIRTUAL_NAME"), *capability = getenv("HFOPT_VIRTUAL_CAPABILITY");
    snprintf(facts.name, sizeof facts.name, "%s", name && *name ? name : "Virtual GPU");
    if (!capability || sscanf(capability, "%d.%d", &facts.major, &facts.minor) != 2) {
        facts.major = 8;
        facts.minor = 0;
    }
    facts.memory_bytes = (size_t)env_number("HFOPT_VIRTUAL_MEMORY_BYTES", 8ll << 30);
    facts.usable_bytes = (size_t)env_number("HFOPT_VIRTUAL_USABLE_BYTES", (long long)facts.memory_bytes);
    facts.context_bytes = (size_t)env_number("HFOPT_VIRTUAL_CONTEXT_BYTES", 0);
    facts.copy_limit_bytes = (size_t)env_number("HFOPT_VIRTUAL_COPY_BYTES", 1 << 20);
    facts.sms = (int)env_number("HFOPT_VIRTUAL_SMS", 28);
    facts.power_limit_w = (int)env_number("HFOPT_VIRTUAL_POWER_LIMIT_W", 250);
    facts.physical = (int)env_number("HFOPT_VIRTUAL_COUNT", 1);
    if (facts.physical > MAX_DEVICES) facts.physical = MAX_DEVICES;
    facts.trace = (int)env_number("HFOPT_VIRTUAL_TRACE", 0);
}

static void load(void)
{
    read_environment();
    find_visible();
}

const card_facts *card(void)
{
    pthread_once(&once, load);
    return &facts;
}

void card_uuid(int physical, unsigned char uuid[16])
{
    card();
    make_uuid(physical, uuid);
}

void card_uuid_text(int physical, char text[41])
{
    card();
    make_uuid_text(physical, text);
}
