// The target's numbers as CUDA asks for them: attributes by number, `cudaDeviceProp` in two layouts.
#include <pthread.h>
#include <string.h>

#include "null.h"

// Attribute numbers are the same in the driver and the runtime. Those not listed answer 0: "no such feature".
#define ATTRIBUTES(X)                                                                                  \
    X(1, t->threads_per_block) X(2, 1024) X(3, 1024) X(4, 64) /* block x, y, z */                      \
    X(5, 2147483647) X(6, 65535) X(7, 65535)                  /* grid x, y, z */                       \
    X(8, t->shared_bytes_per_block) X(9, 65536)               /* constant memory */                    \
    X(10, t->warp_size) X(11, 2147483647)                     /* pitch */                              \
    X(12, t->registers_per_block) X(13, t->clock_khz) X(14, 512) X(15, 1) /* texture alignment, overlap */ \
    X(16, t->sm_count) X(19, 1) X(30, 512)                    /* map host memory, surface alignment */ \
    X(31, 1) X(33, 1)                                         /* concurrent kernels, PCI bus */        \
    X(36, t->memory_clock_khz) X(37, t->memory_bus_bits) X(38, t->l2_bytes) X(39, t->threads_per_sm)   \
    X(40, 3) X(41, 1) X(51, 32) /* copy engines, unified addressing, pitch alignment */                \
    X(75, t->major) X(76, t->minor) X(78, 1) X(79, 1) X(80, 1) /* stream priorities, L1 caching */     \
    X(81, t->shared_bytes_per_sm) X(82, t->registers_per_sm) X(83, 1) /* managed memory */             \
    X(89, 1) X(90, 1) X(95, 1) /* managed access, preemption, cooperative launch */                    \
    X(97, t->shared_bytes_per_block_optin) X(99, 1) X(102, 1) X(106, t->blocks_per_sm)                         \
    X(108, t->persisting_l2_bytes) X(111, t->reserved_shared_bytes_per_block)                          \
    X(115, 1) X(120, t->major >= 9) /* memory pools, clusters */

int null_attribute(int *out, int attribute, int device)
{
    int result = null_device_ok(device);
    if (result)
        return result;
    if (!out)
        return INVALID_VALUE;
    const struct null_target *t = null_target();
    switch (attribute) {
#define X(number, value) \
    case number:         \
        *out = (int)(value); \
        break;
        ATTRIBUTES(X)
#undef X
    default:
        *out = 0;
    }
    return SUCCESS;
}

#define PROPERTIES(X)                                                                                            \
    X(totalGlobalMem, t->memory_bytes) X(sharedMemPerBlock, t->shared_bytes_per_block)                           \
    X(regsPerBlock, t->registers_per_block) X(warpSize, t->warp_size) X(memPitch, 2147483647)                    \
    X(maxThreadsPerBlock, t->threads_per_block) X(clockRate, t->clock_khz) X(totalConstMem, 65536)               \
    X(major, t->major) X(minor, t->minor) X(textureAlignment, 512) X(texturePitchAlignment, 32)                  \
    X(deviceOverlap, 1) X(multiProcessorCount, t->sm_count) X(canMapHostMemory, 1) X(surfaceAlignment, 512)      \
    X(concurrentKernels, 1) X(pciBusID, 1) X(asyncEngineCount, 3) X(unifiedAddressing, 1)                        \
    X(memoryClockRate, t->memory_clock_khz) X(memoryBusWidth, t->memory_bus_bits) X(l2CacheSize, t->l2_bytes)    \
    X(persistingL2CacheMaxSize, t->persisting_l2_bytes) X(maxThreadsPerMultiProcessor, t->threads_per_sm)        \
    X(streamPrioritiesSupported, 1) X(globalL1CacheSupported, 1) X(localL1CacheSupported, 1)                     \
    X(sharedMemPerMultiprocessor, t->shared_bytes_per_sm) X(regsPerMultiprocessor, t->registers_per_sm)          \
    X(managedMemory, 1) X(concurrentManagedAccess, 1) X(computePreemptionSupported, 1) X(cooperativeLaunch, 1)   \
    X(sharedMemPerBlockOptin, t->shared_bytes_per_block_optin) X(maxBlocksPerMultiProcessor, t->blocks_per_sm)   \
    X(reservedSharedMemPerBlock, t->reserved_shared_bytes_per_block) X(hostRegisterSupported, 1)                 \
    X(memoryPoolsSupported, 1) X(clusterLaunch, t->major >= 9)

struct field {
    const char *name;
    unsigned short offset, size;
};

// The last row of each is the size of the whole.
#define FIELD(name, offset, size) {#name, offset, size},
static const struct field layout_12[] = {
#include "properties_12.inc"
};
static const struct field layout_13[] = {
#include "properties_13.inc"
};
#undef FIELD

struct layout {
    const struct field *fields;
    size_t count;
    unsigned char filled[1100];
};
static struct layout layouts[] = {
    {.fields = layout_12, .count = sizeof layout_12 / sizeof *layout_12},
    {.fields = layout_13, .count = sizeof layout_13 / sizeof *layout_13},
};

// A field that one of the CUDA lines does not have is skipped in it.
static void put(struct layout *layout, const char *name, const void *bytes, size_t size)
{
    for (size_t i = 0; i < layout->count; i++) {
        const struct field *field = &layout->fields[i];
        if (!strcmp(field->name, name)) {
            memcpy(layout->filled + field->offset, bytes, size < field->size ? size : field->size);
            return;
        }
    }
}

static void fill_layouts(void)
{
    const struct null_target *t = null_target();
    const int threads[3] = {1024, 1024, 64}, grid[3] = {2147483647, 65535, 65535};
    const unsigned char uuid[16] = {NULL_UUID_BYTE};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        struct layout *layout = &layouts[i];
        put(layout, "name", t->name, sizeof t->name);
        put(layout, "uuid", uuid, sizeof uuid);
        put(layout, "maxThreadsDim", threads, sizeof threads);
        put(layout, "maxGridSize", grid, sizeof grid);
        // Little-endian: the low bytes of the value are its 4-byte form.
#define X(name, expression)                     \
    {                                           \
        long long value = (expression);         \
        put(layout, #name, &value, sizeof value); \
    }
        PROPERTIES(X)
#undef X
    }
}

int null_properties(void *out, int device, int cuda_major)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int result = null_device_ok(device);
    if (result)
        return result;
    if (!out)
        return INVALID_VALUE;
    pthread_once(&once, fill_layouts);
    struct layout *layout = &layouts[cuda_major == 12 ? 0 : 1];
    memcpy(out, layout->filled, layout->fields[layout->count - 1].offset);
    return SUCCESS;
}
