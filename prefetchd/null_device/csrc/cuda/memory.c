// Device memory: anonymous private mappings without reservation, so that what nobody writes costs nothing. The sum
// is bounded by the target's memory, and what is released returns to the operating system at once.
#define _GNU_SOURCE
#include "null.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Sorted by address: a pointer's allocation is found by bisection.
static struct null_range *ranges;
static size_t count, capacity;
static size_t used;
static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;

// As FREE_IN_FORKED_CHILD, for a lock that the child cannot unlock because it does not own it.
static void before_fork(void) { pthread_rwlock_wrlock(&lock); }
static void after_fork(void) { pthread_rwlock_unlock(&lock); }
static void child_after_fork(void) { pthread_rwlock_init(&lock, NULL); }
__attribute__((constructor)) static void guard_fork(void)
{
    pthread_atfork(before_fork, after_fork, child_after_fork);
}

static bool on_device(enum null_kind kind) { return kind == DEVICE_MEMORY || kind == MANAGED_MEMORY; }

static size_t memory_limit(void)
{
    const struct null_target *target = null_target();
    return target ? (size_t)target->memory_bytes : 0;
}

// Index of the first range that starts after the pointer.
static size_t position(const char *pointer)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start <= pointer)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool insert(struct null_range range)
{
    if (count == capacity) {
        size_t wanted = capacity ? 2 * capacity : 64;
        struct null_range *grown = realloc(ranges, wanted * sizeof *ranges);
        if (!grown)
            return false;
        ranges = grown;
        capacity = wanted;
    }
    size_t index = position(range.start);
    memmove(ranges + index + 1, ranges + index, (count - index) * sizeof *ranges);
    ranges[index] = range;
    count++;
    return true;
}

static int map_locked(void **out, size_t size, enum null_kind kind)
{
    if (on_device(kind) && size > memory_limit() - used)
        return OUT_OF_MEMORY;
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return OUT_OF_MEMORY;
    if (!insert((struct null_range){start, size, kind, NULL})) {
        munmap(start, size);
        return OUT_OF_MEMORY;
    }
    if (on_device(kind))
        used += size;
    *out = start;
    return SUCCESS;
}

int null_allocate(void **out, size_t size, enum null_kind kind)
{
    if (!out)
        return INVALID_VALUE;
    *out = NULL;
    if (!size)
        return SUCCESS;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (size > SIZE_MAX - page)
        return OUT_OF_MEMORY;
    size = (size + page - 1) / page * page;
    pthread_rwlock_wrlock(&lock);
    int result = map_locked(out, size, kind);
    pthread_rwlock_unlock(&lock);
    return result;
}

int null_register(void *start, size_t size)
{
    if (!start || !size)
        return INVALID_VALUE;
    pthread_rwlock_wrlock(&lock);
    bool done = insert((struct null_range){start, size, REGISTERED_MEMORY, NULL});
    pthread_rwlock_unlock(&lock);
    return done ? SUCCESS : OUT_OF_MEMORY;
}

int null_reserve(size_t size)
{
    pthread_rwlock_wrlock(&lock);
    bool fits = size <= memory_limit() - used;
    if (fits)
        used += size;
    pthread_rwlock_unlock(&lock);
    return fits ? SUCCESS : OUT_OF_MEMORY;
}

void null_unreserve(size_t size)
{
    pthread_rwlock_wrlock(&lock);
    used -= size;
    pthread_rwlock_unlock(&lock);
}

int null_map(void *start, size_t size, void *owner)
{
    if (mprotect(start, size, PROT_READ | PROT_WRITE))
        return INVALID_VALUE;
    pthread_rwlock_wrlock(&lock);
    bool done = insert((struct null_range){start, size, MAPPED_MEMORY, owner});
    pthread_rwlock_unlock(&lock);
    return done ? SUCCESS : OUT_OF_MEMORY;
}

int null_release(void *pointer, int kinds)
{
    if (!pointer)
        return SUCCESS;
    int result = INVALID_VALUE;
    pthread_rwlock_wrlock(&lock);
    size_t index = position(pointer);
    if (index && ranges[index - 1].start == pointer && (ranges[index - 1].kind & kinds)) {
        struct null_range range = ranges[--index];
        memmove(ranges + index, ranges + index + 1, (count - index - 1) * sizeof *ranges);
        count--;
        if (on_device(range.kind))
            used -= range.size;
        if (range.kind == MAPPED_MEMORY) // the addresses stay reserved, the pages go
            mmap(range.start, range.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        else if (range.kind != REGISTERED_MEMORY)
            munmap(range.start, range.size);
        result = SUCCESS;
    }
    pthread_rwlock_unlock(&lock);
    return result;
}

bool null_find(const void *pointer, struct null_range *out)
{
    pthread_rwlock_rdlock(&lock);
    size_t index = position(pointer);
    bool found = index && (size_t)((const char *)pointer - ranges[index - 1].start) < ranges[index - 1].size;
    if (found)
        *out = ranges[index - 1];
    pthread_rwlock_unlock(&lock);
    return found;
}

void null_memory_info(size_t *available, size_t *total)
{
    pthread_rwlock_rdlock(&lock);
    if (total)
        *total = memory_limit();
    if (available)
        *available = memory_limit() - used;
    pthread_rwlock_unlock(&lock);
}
