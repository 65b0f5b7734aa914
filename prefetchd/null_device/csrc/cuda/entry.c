// Look-up of driver entry points by name, and the marker by which others know this library.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "null.h"

// The version of the contract with Python: the name of the marker, the variable and the exported functions.
int prefetchd_null_device = 1;

static void *self;
static pthread_once_t once = PTHREAD_ONCE_INIT;

// Our own handle: another library's symbol of the same name must never be answered.
static void open_self(void)
{
    Dl_info info;
    if (dladdr(&prefetchd_null_device, &info))
        self = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
}

void *null_handle(void)
{
    static atomic_uintptr_t next = 0x1000;
    return (void *)atomic_fetch_add(&next, 16);
}

void *null_entry(const char *name, int cuda_version)
{
    pthread_once(&once, open_self);
    if (!self || !name || strncmp(name, "cu", 2))
        return NULL;
    // Version 2 writes through an argument that a caller of version 1 does not pass.
    if (!strcmp(name, "cuGetProcAddress") && cuda_version < 12000)
        return dlsym(self, name);
    static const char *const versions[] = {"_v4", "_v3", "_v2", ""};
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
        char spelling[128];
        if ((size_t)snprintf(spelling, sizeof spelling, "%s%s", name, versions[i]) >= sizeof spelling)
            return NULL;
        void *found = dlsym(self, spelling);
        if (found)
            return found;
    }
    return NULL;
}
