// CUDA driver: allocation, copies, fills and pointer attributes. A device pointer is the address of the bytes.
#include <string.h>

#include "null.h"

typedef uintptr_t device_pointer;

int cuMemAlloc_v2(void **out, size_t size) { return size ? null_allocate(out, size, DEVICE_MEMORY) : INVALID_VALUE; }
ALIAS(cuMemAlloc, cuMemAlloc_v2);
ALIAS(cuMemAllocAsync, cuMemAlloc_v2);
ALIAS(cuMemAllocAsync_ptsz, cuMemAlloc_v2);
ALIAS(cuMemAllocFromPoolAsync, cuMemAlloc_v2);
ALIAS(cuMemAllocFromPoolAsync_ptsz, cuMemAlloc_v2);
int cuMemAllocManaged(void **out, size_t size, unsigned flags UNUSED)
{
    return size ? null_allocate(out, size, MANAGED_MEMORY) : INVALID_VALUE;
}
int cuMemHostAlloc(void **out, size_t size) { return null_allocate(out, size, HOST_MEMORY); }
ALIAS(cuMemAllocHost, cuMemHostAlloc);
ALIAS(cuMemAllocHost_v2, cuMemHostAlloc);

int cuMemFree_v2(void *pointer) { return null_release(pointer, DEVICE_MEMORY | MANAGED_MEMORY); }
ALIAS(cuMemFree, cuMemFree_v2);
ALIAS(cuMemFreeAsync, cuMemFree_v2);
ALIAS(cuMemFreeAsync_ptsz, cuMemFree_v2);
int cuMemFreeHost(void *pointer) { return null_release(pointer, HOST_MEMORY); }
int cuMemHostRegister_v2(void *start, size_t size) { return null_register(start, size); }
ALIAS(cuMemHostRegister, cuMemHostRegister_v2);
int cuMemHostUnregister(void *start) { return null_release(start, REGISTERED_MEMORY); }

int cuMemHostGetDevicePointer_v2(void **out, void *host)
{
    if (!out)
        return INVALID_VALUE;
    *out = host;
    return SUCCESS;
}
ALIAS(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2);

int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    null_memory_info(available, total);
    return null_device_ok(0);
}
ALIAS(cuMemGetInfo, cuMemGetInfo_v2);

int cuMemGetAddressRange_v2(void **base, size_t *size, void *pointer)
{
    struct null_range range;
    if (!null_find(pointer, &range))
        return INVALID_VALUE;
    if (base)
        *base = range.start;
    if (size)
        *size = range.size;
    return SUCCESS;
}
ALIAS(cuMemGetAddressRange, cuMemGetAddressRange_v2);

// All of these are "to, from, bytes"; the asynchronous ones have a stream behind.
int cuMemcpy(void *to, const void *from, size_t size) { return null_copy(to, from, size); }
ALIAS(cuMemcpy_ptds, cuMemcpy);
ALIAS(cuMemcpyAsync, cuMemcpy);
ALIAS(cuMemcpyAsync_ptsz, cuMemcpy);
#define COPIES(name)                         \
    ALIAS(cuMemcpy##name, cuMemcpy);         \
    ALIAS(cuMemcpy##name##_v2, cuMemcpy);    \
    ALIAS(cuMemcpy##name##_v2_ptds, cuMemcpy); \
    ALIAS(cuMemcpy##name##Async, cuMemcpy);  \
    ALIAS(cuMemcpy##name##Async_v2, cuMemcpy); \
    ALIAS(cuMemcpy##name##Async_v2_ptsz, cuMemcpy)
COPIES(HtoD);
COPIES(DtoH);
COPIES(DtoD);

int cuMemcpyPeer(void *to, void *to_context UNUSED, const void *from, void *from_context UNUSED, size_t size)
{
    return null_copy(to, from, size);
}
ALIAS(cuMemcpyPeer_ptds, cuMemcpyPeer);
ALIAS(cuMemcpyPeerAsync, cuMemcpyPeer);
ALIAS(cuMemcpyPeerAsync_ptsz, cuMemcpyPeer);

// CUDA_MEMCPY2D; a side is at `host` or `device` according to its memory type, and never an array here.
struct side {
    size_t x_bytes, y;
    int type;
    char *host, *device;
    void *array;
    size_t pitch;
};
struct copy_2d {
    struct side from, to;
    size_t width, height;
};
enum { TYPE_HOST = 1, TYPE_DEVICE = 2, TYPE_ARRAY = 3 };

static char *start_of(const struct side *side)
{
    return (side->type == TYPE_HOST ? side->host : side->device) + side->y * side->pitch + side->x_bytes;
}

int cuMemcpy2D_v2(const struct copy_2d *copy)
{
    if (!copy)
        return INVALID_VALUE;
    if (copy->from.type == TYPE_ARRAY || copy->to.type == TYPE_ARRAY)
        return NOT_SUPPORTED;
    return null_copy_rows(start_of(&copy->to), copy->to.pitch, start_of(&copy->from), copy->from.pitch, copy->width,
                          copy->height);
}
ALIAS(cuMemcpy2D_v2_ptds, cuMemcpy2D_v2);
ALIAS(cuMemcpy2DUnaligned_v2, cuMemcpy2D_v2);
ALIAS(cuMemcpy2DUnaligned_v2_ptds, cuMemcpy2D_v2);
ALIAS(cuMemcpy2DAsync_v2, cuMemcpy2D_v2);
ALIAS(cuMemcpy2DAsync_v2_ptsz, cuMemcpy2D_v2);

#define FILLS(bits, type)                                                                              \
    int cuMemsetD##bits##_v2(void *to, type value, size_t count)                                       \
    {                                                                                                  \
        return null_fill(to, value, bits / 8, count);                                                  \
    }                                                                                                  \
    ALIAS(cuMemsetD##bits, cuMemsetD##bits##_v2);                                                      \
    ALIAS(cuMemsetD##bits##_v2_ptds, cuMemsetD##bits##_v2);                                            \
    ALIAS(cuMemsetD##bits##Async, cuMemsetD##bits##_v2);                                               \
    ALIAS(cuMemsetD##bits##Async_ptsz, cuMemsetD##bits##_v2);                                          \
    int cuMemsetD2D##bits##_v2(void *to, size_t pitch, type value, size_t width, size_t height)        \
    {                                                                                                  \
        return null_fill_rows(to, pitch, value, bits / 8, width, height);                              \
    }                                                                                                  \
    ALIAS(cuMemsetD2D##bits, cuMemsetD2D##bits##_v2);                                                  \
    ALIAS(cuMemsetD2D##bits##_v2_ptds, cuMemsetD2D##bits##_v2);                                        \
    ALIAS(cuMemsetD2D##bits##Async, cuMemsetD2D##bits##_v2);                                           \
    ALIAS(cuMemsetD2D##bits##Async_ptsz, cuMemsetD2D##bits##_v2);
FILLS(8, unsigned char)
FILLS(16, unsigned short)
FILLS(32, unsigned)

// Triton tells a host tensor from a device tensor by the failure for memory that the driver does not know.
int cuPointerGetAttribute(void *out, int attribute, device_pointer pointer)
{
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, IS_MANAGED = 8, DEVICE_ORDINAL = 9,
           RANGE_START = 11, RANGE_SIZE = 12, MAPPED = 13 };
    struct null_range range;
    if (!out || !null_find((void *)pointer, &range))
        return INVALID_VALUE;
    bool on_host = range.kind == HOST_MEMORY || range.kind == REGISTERED_MEMORY;
    switch (attribute) {
    case CONTEXT:
        *(void **)out = (void *)0x10;
        return SUCCESS;
    case MEMORY_TYPE:
        *(unsigned *)out = on_host ? TYPE_HOST : TYPE_DEVICE;
        return SUCCESS;
    case DEVICE_POINTER:
    case HOST_POINTER:
        *(device_pointer *)out = pointer;
        return attribute == HOST_POINTER && !on_host && range.kind != MANAGED_MEMORY ? INVALID_VALUE : SUCCESS;
    case IS_MANAGED:
        *(unsigned *)out = range.kind == MANAGED_MEMORY;
        return SUCCESS;
    case DEVICE_ORDINAL:
        *(int *)out = 0;
        return SUCCESS;
    case RANGE_START:
        *(void **)out = range.start;
        return SUCCESS;
    case RANGE_SIZE:
        *(size_t *)out = range.size;
        return SUCCESS;
    case MAPPED:
        *(unsigned *)out = 1;
        return SUCCESS;
    default:
        return NOT_SUPPORTED;
    }
}

int cuPointerGetAttributes(unsigned count, const int *attributes, void **out, device_pointer pointer)
{
    // The plural form answers zeros instead of failing.
    for (unsigned i = 0; i < count; i++) {
        if (cuPointerGetAttribute(out[i], attributes[i], pointer))
            memset(out[i], 0, 4);
    }
    return SUCCESS;
}
SUCCEEDS(cuPointerSetAttribute)
SUCCEEDS(cuMemAdvise)
SUCCEEDS(cuMemAdvise_v2)
SUCCEEDS(cuMemPrefetchAsync)
SUCCEEDS(cuMemPrefetchAsync_ptsz)
SUCCEEDS(cuMemPrefetchAsync_v2)
SUCCEEDS(cuMemPrefetchAsync_v2_ptsz)

int cuDeviceGetDefaultMemPool(void **pool, int device UNUSED)
{
    if (!pool)
        return INVALID_VALUE;
    *pool = null_handle();
    return SUCCESS;
}
ALIAS(cuDeviceGetMemPool, cuDeviceGetDefaultMemPool);
SUCCEEDS(cuDeviceSetMemPool)
SUCCEEDS(cuMemPoolSetAttribute)
SUCCEEDS(cuMemPoolSetAccess)
SUCCEEDS(cuMemPoolTrimTo)
SUCCEEDS(cuMemPoolDestroy)
