// CUDA runtime: allocation, copies, fills, pointer attributes and memory pools.
#include <string.h>

#include "null.h"

int cudaMalloc(void **out, size_t size) { return runtime(null_allocate(out, size, DEVICE_MEMORY)); }
int cudaMallocAsync(void **out, size_t size, void *stream UNUSED) { return cudaMalloc(out, size); }
ALIAS(cudaMallocAsync_ptsz, cudaMallocAsync);
int cudaMallocFromPoolAsync(void **out, size_t size, void *pool UNUSED, void *stream UNUSED)
{
    return cudaMalloc(out, size);
}
ALIAS(cudaMallocFromPoolAsync_ptsz, cudaMallocFromPoolAsync);
int cudaMallocManaged(void **out, size_t size, unsigned flags UNUSED)
{
    return runtime(null_allocate(out, size, MANAGED_MEMORY));
}
int cudaHostAlloc(void **out, size_t size, unsigned flags UNUSED)
{
    return runtime(null_allocate(out, size, HOST_MEMORY));
}
int cudaMallocHost(void **out, size_t size) { return cudaHostAlloc(out, size, 0); }

int cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height)
{
    if (!pitch || width > SIZE_MAX - 511)
        return runtime(INVALID_VALUE);
    *pitch = (width + 511) / 512 * 512;
    if (height && *pitch > SIZE_MAX / height)
        return runtime(OUT_OF_MEMORY);
    return cudaMalloc(out, *pitch * height);
}

int cudaFree(void *pointer) { return runtime(null_release(pointer, DEVICE_MEMORY | MANAGED_MEMORY)); }
int cudaFreeAsync(void *pointer, void *stream UNUSED) { return cudaFree(pointer); }
ALIAS(cudaFreeAsync_ptsz, cudaFreeAsync);
int cudaFreeHost(void *pointer) { return runtime(null_release(pointer, HOST_MEMORY)); }
int cudaHostRegister(void *start, size_t size, unsigned flags UNUSED) { return runtime(null_register(start, size)); }
int cudaHostUnregister(void *start) { return runtime(null_release(start, REGISTERED_MEMORY)); }

int cudaHostGetDevicePointer(void **out, void *host, unsigned flags UNUSED)
{
    if (!out)
        return runtime(INVALID_VALUE);
    *out = host;
    return SUCCESS;
}
int cudaHostGetFlags(unsigned *flags, void *host UNUSED)
{
    if (flags)
        *flags = 0;
    return SUCCESS;
}

int cudaMemGetInfo(size_t *available, size_t *total)
{
    null_memory_info(available, total);
    return runtime(null_device_ok(0));
}

// The kind of a copy does not matter: every pointer is host memory.
int cudaMemcpy(void *to, const void *from, size_t size, int kind UNUSED) { return runtime(null_copy(to, from, size)); }
ALIAS(cudaMemcpy_ptds, cudaMemcpy);
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind UNUSED, void *stream UNUSED)
{
    return runtime(null_copy(to, from, size));
}
ALIAS(cudaMemcpyAsync_ptsz, cudaMemcpyAsync);
int cudaMemcpyPeer(void *to, int to_device UNUSED, const void *from, int from_device UNUSED, size_t size)
{
    return runtime(null_copy(to, from, size));
}
int cudaMemcpyPeerAsync(void *to, int to_device UNUSED, const void *from, int from_device UNUSED, size_t size,
                        void *stream UNUSED)
{
    return runtime(null_copy(to, from, size));
}
int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                 int kind UNUSED)
{
    return runtime(null_copy_rows(to, to_pitch, from, from_pitch, width, height));
}
ALIAS(cudaMemcpy2D_ptds, cudaMemcpy2D);
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      int kind UNUSED, void *stream UNUSED)
{
    return runtime(null_copy_rows(to, to_pitch, from, from_pitch, width, height));
}
ALIAS(cudaMemcpy2DAsync_ptsz, cudaMemcpy2DAsync);

int cudaMemset(void *to, int value, size_t count) { return runtime(null_fill(to, (unsigned)value, 1, count)); }
ALIAS(cudaMemset_ptds, cudaMemset);
int cudaMemsetAsync(void *to, int value, size_t count, void *stream UNUSED) { return cudaMemset(to, value, count); }
ALIAS(cudaMemsetAsync_ptsz, cudaMemsetAsync);
int cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height)
{
    return runtime(null_fill_rows(to, pitch, (unsigned)value, 1, width, height));
}
ALIAS(cudaMemset2D_ptds, cudaMemset2D);
int cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, void *stream UNUSED)
{
    return cudaMemset2D(to, pitch, value, width, height);
}
ALIAS(cudaMemset2DAsync_ptsz, cudaMemset2DAsync);

// The part of cudaPointerAttributes that CUDA 12 and 13 share; CUDA 13 has reserved words after it.
struct pointer_attributes {
    int type, device;
    void *device_pointer, *host_pointer;
};

int cudaPointerGetAttributes(struct pointer_attributes *out, const void *pointer)
{
    enum { UNREGISTERED, HOST, DEVICE, MANAGED };
    if (!out)
        return runtime(INVALID_VALUE);
    struct null_range range;
    memset(out, 0, sizeof *out);
    if (!null_find(pointer, &range)) {
        out->type = UNREGISTERED;
        out->device = -2; // what the real runtime reports for memory it does not know
        out->host_pointer = (void *)pointer;
        return SUCCESS;
    }
    bool only_device = range.kind == DEVICE_MEMORY || range.kind == MAPPED_MEMORY;
    out->type = only_device ? DEVICE : range.kind == MANAGED_MEMORY ? MANAGED : HOST;
    out->device_pointer = (void *)pointer;
    if (!only_device)
        out->host_pointer = (void *)pointer;
    return SUCCESS;
}

static int handle_out(void **out)
{
    if (!out)
        return runtime(INVALID_VALUE);
    *out = null_handle();
    return SUCCESS;
}
int cudaDeviceGetDefaultMemPool(void **pool, int device UNUSED) { return handle_out(pool); }
int cudaDeviceGetMemPool(void **pool, int device UNUSED) { return handle_out(pool); }
int cudaMemPoolCreate(void **pool, const void *properties UNUSED) { return handle_out(pool); }

// Every attribute that is read is 8 bytes or an int; the wider ones hold sizes in use.
int cudaMemPoolGetAttribute(void *pool UNUSED, int attribute, void *value)
{
    enum { FIRST_WIDE = 4 };
    if (!value)
        return runtime(INVALID_VALUE);
    memset(value, 0, attribute >= FIRST_WIDE ? 8 : 4);
    return SUCCESS;
}
int cudaDeviceGetGraphMemAttribute(int device UNUSED, int attribute UNUSED, void *value)
{
    if (!value)
        return runtime(INVALID_VALUE);
    memset(value, 0, 8);
    return SUCCESS;
}

SUCCEEDS(cudaMemPoolSetAttribute)
SUCCEEDS(cudaMemPoolSetAccess)
SUCCEEDS(cudaMemPoolTrimTo)
SUCCEEDS(cudaMemPoolDestroy)
SUCCEEDS(cudaDeviceSetMemPool)
SUCCEEDS(cudaDeviceSetGraphMemAttribute)
SUCCEEDS(cudaDeviceGraphMemTrim)
SUCCEEDS(cudaMemAdvise)
SUCCEEDS(cudaMemAdvise_v2)
SUCCEEDS(cudaMemPrefetchAsync)
SUCCEEDS(cudaMemPrefetchAsync_ptsz)
