// Virtual memory management: addresses are reserved, memory is created, and the one is mapped onto the other.
// Created memory is only an amount, counted against the target when it is created; the bytes appear in the reserved
// range itself. So a handle mapped at two addresses is two memories here, which no program has been seen to need.
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "null.h"

// What every device with the feature reports.
#define GRANULARITY ((size_t)2 << 20)

// CUmemAllocationProp is larger; nothing in it changes an amount of bytes, so all of them are one handle type.
struct created {
    size_t size;
    int references;
};

int cuMemGetAllocationGranularity(size_t *granularity)
{
    if (!granularity)
        return INVALID_VALUE;
    *granularity = GRANULARITY;
    return SUCCESS;
}

int cuMemCreate(struct created **handle, size_t size)
{
    if (!handle || !size || size % GRANULARITY)
        return INVALID_VALUE;
    int result = null_reserve(size);
    if (result)
        return result;
    *handle = malloc(sizeof **handle);
    if (!*handle) {
        null_unreserve(size);
        return OUT_OF_MEMORY;
    }
    **handle = (struct created){size, 1};
    return SUCCESS;
}

// Released and unmapped in either order: the amount returns with the last of the two.
static void drop(struct created *handle)
{
    if (!__atomic_sub_fetch(&handle->references, 1, __ATOMIC_ACQ_REL)) {
        null_unreserve(handle->size);
        free(handle);
    }
}

int cuMemRelease(struct created *handle)
{
    if (!handle)
        return INVALID_VALUE;
    drop(handle);
    return SUCCESS;
}

int cuMemAddressReserve(void **address, size_t size)
{
    if (!address || !size || size % GRANULARITY)
        return INVALID_VALUE;
    void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return OUT_OF_MEMORY;
    *address = start;
    return SUCCESS;
}

int cuMemAddressFree(void *address, size_t size)
{
    return address && !munmap(address, size) ? SUCCESS : INVALID_VALUE;
}

int cuMemMap(void *address, size_t size, size_t offset UNUSED, struct created *handle)
{
    if (!address || !handle || !size || size > handle->size)
        return INVALID_VALUE;
    int result = null_map(address, size, handle);
    if (!result)
        __atomic_add_fetch(&handle->references, 1, __ATOMIC_ACQ_REL);
    return result;
}

int cuMemUnmap(void *address, size_t size)
{
    // One call may cover several mappings that lie side by side.
    char *end = (char *)address + size;
    for (char *start = address; start < end;) {
        struct null_range range;
        if (!null_find(start, &range) || range.start != start || range.kind != MAPPED_MEMORY)
            return INVALID_VALUE;
        null_release(start, MAPPED_MEMORY);
        drop(range.owner);
        start += range.size;
    }
    return SUCCESS;
}

int cuMemSetAccess(void *address UNUSED, size_t size UNUSED) { return SUCCESS; }

int cuMemGetAccess(unsigned long long *flags)
{
    enum { READ_WRITE = 3 };
    if (!flags)
        return INVALID_VALUE;
    *flags = READ_WRITE;
    return SUCCESS;
}
