// What the parts of the null CUDA device share: error codes, memory, fake handles and the alias macro.
// CUDA's headers are not needed: handles are pointers, enumerations are ints.
#ifndef PREFETCHD_NULL_H
#define PREFETCHD_NULL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../common/target.h"

#pragma GCC visibility push(hidden)

// The driver and the runtime use the same numbers for these.
enum null_error {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};

enum null_kind {
    DEVICE_MEMORY = 1,
    MANAGED_MEMORY = 2,
    HOST_MEMORY = 4,
    REGISTERED_MEMORY = 8, // a program's own pages, known as host memory
    MAPPED_MEMORY = 16,    // device memory at an address that the program reserved
};

struct null_range {
    char *start;
    size_t size;
    enum null_kind kind;
    void *owner; // what MAPPED_MEMORY was created as
};

// memory.c: the table of allocations.
int null_allocate(void **out, size_t size, enum null_kind kind);
int null_register(void *start, size_t size);
int null_release(void *pointer, int kinds);
bool null_find(const void *pointer, struct null_range *out);
// For virtual.c: an amount of device memory without an address, and pages at a reserved one.
int null_reserve(size_t size);
void null_unreserve(size_t size);
int null_map(void *start, size_t size, void *owner);
void null_memory_info(size_t *available, size_t *total);

// copy.c: the bytes really move.
int null_copy(void *to, const void *from, size_t size);
int null_copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height);
int null_fill(void *to, unsigned value, size_t element, size_t count);
int null_fill_rows(void *to, size_t pitch, unsigned value, size_t element, size_t width, size_t height);

// device.c
int null_attribute(int *out, int attribute, int device);
int null_properties(void *out, int device, int cuda_major);

// entry.c: the newest version of a driver entry point, or NULL.
void *null_entry(const char *name, int cuda_version);

// error.c
const char *null_error_name(int code);
const char *null_error_text(int code);

// runtime_device.c: remembers a failure as this thread's last error and passes the code on.
int runtime(int code);

// A handle nobody else has; nothing is ever read through it.
void *null_handle(void);

// A driver entry point's result for one device ordinal.
static inline int null_device_ok(int device)
{
    return !null_target() ? NO_DEVICE : device ? INVALID_DEVICE : SUCCESS;
}

#pragma GCC visibility pop

// Another spelling of a function of the same file: CUDA's `_v2`, `_ptsz` and `_ptds` names.
#define ALIAS(spelling, function) extern __typeof__(function) spelling __attribute__((alias(#function)))

// An entry point that only has to succeed. Its arguments are ignored, which C's calling conventions allow.
#define SUCCEEDS(name) \
    int name(void);    \
    int name(void) { return SUCCESS; }

#define UNUSED __attribute__((unused))

// Helpers fork while other threads may hold a mutex; the child must find it free. Handlers run before the fork in the
// reverse order of the files' names: symbols.c before memory.c, which is the order in which one call takes both.
#define FREE_IN_FORKED_CHILD(mutex)                                        \
    static void lock_for_fork(void) { pthread_mutex_lock(&mutex); }        \
    static void unlock_after_fork(void) { pthread_mutex_unlock(&mutex); }  \
    __attribute__((constructor)) static void guard_fork(void)              \
    {                                                                      \
        pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork); \
    }

#endif
