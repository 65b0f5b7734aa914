// Kernels, in the runtime and the driver: they load with a made-up handle, and a launch succeeds and does nothing.
#include <string.h>

#include "null.h"

struct dim3 {
    unsigned x, y, z;
};

// What `kernel<<<grid, block, shared, stream>>>` leaves between its two calls; launches nest in no thread.
static __thread struct {
    struct dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream)
{
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void **stream)
{
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *stream = configuration.stream;
    return SUCCESS;
}

static int handle_out(void **out)
{
    if (!out)
        return INVALID_VALUE;
    *out = null_handle();
    return SUCCESS;
}

// A kernel's handle is its host function.
int __cudaGetKernel(void **kernel, const void *function)
{
    *kernel = (void *)function;
    return SUCCESS;
}
int cudaGetKernel(void **kernel, const void *function) { return __cudaGetKernel(kernel, function); }
int cudaGetFuncBySymbol(void **out, const void *function) { return __cudaGetKernel(out, function); }

SUCCEEDS(__cudaLaunchKernel)
SUCCEEDS(__cudaLaunchKernel_ptsz)
SUCCEEDS(cudaLaunchKernel)
SUCCEEDS(cudaLaunchKernel_ptsz)
SUCCEEDS(cudaLaunchKernelExC)
SUCCEEDS(cudaLaunchKernelExC_ptsz)
SUCCEEDS(cudaLaunchCooperativeKernel)
SUCCEEDS(cudaLaunchCooperativeKernel_ptsz)
SUCCEEDS(cudaFuncSetAttribute)
SUCCEEDS(cudaFuncSetCacheConfig)
SUCCEEDS(cudaFuncSetSharedMemConfig)
SUCCEEDS(cudaKernelSetAttributeForDevice)
SUCCEEDS(cuLaunchKernel)
SUCCEEDS(cuLaunchKernel_ptsz)
SUCCEEDS(cuLaunchKernelEx)
SUCCEEDS(cuLaunchKernelEx_ptsz)
SUCCEEDS(cuLaunchCooperativeKernel)
SUCCEEDS(cuLaunchCooperativeKernel_ptsz)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuFuncSetSharedMemConfig)
SUCCEEDS(cuFuncLoad)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuKernelSetCacheConfig)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cudaLibraryUnload)
SUCCEEDS(cuModuleUnload)

int cuLibraryLoadData(void **library) { return handle_out(library); }
int cuLibraryLoadFromFile(void **library) { return handle_out(library); }
int cuLibraryGetKernel(void **kernel) { return handle_out(kernel); }
int cuLibraryGetModule(void **module) { return handle_out(module); }
int cuModuleLoad(void **module) { return handle_out(module); }
int cuModuleLoadData(void **module) { return handle_out(module); }
int cuModuleLoadDataEx(void **module) { return handle_out(module); }
int cuModuleLoadFatBinary(void **module) { return handle_out(module); }
int cuModuleGetFunction(void **function) { return handle_out(function); }
int cuKernelGetFunction(void **function) { return handle_out(function); }
int cuKernelGetLibrary(void **library) { return handle_out(library); }
int cuFuncGetModule(void **module) { return handle_out(module); }
int cudaLibraryLoadData(void **library) { return runtime(handle_out(library)); }
int cudaLibraryLoadFromFile(void **library) { return runtime(handle_out(library)); }
int cudaLibraryGetKernel(void **kernel) { return runtime(handle_out(kernel)); }

// A binary's contents are not read: every library holds one kernel.
int cuLibraryGetKernelCount(unsigned *count, void *library UNUSED)
{
    if (!count)
        return INVALID_VALUE;
    *count = 1;
    return SUCCESS;
}
ALIAS(cudaLibraryGetKernelCount, cuLibraryGetKernelCount);
ALIAS(cuModuleGetFunctionCount, cuLibraryGetKernelCount);

int cuLibraryEnumerateKernels(void **kernels, unsigned count, void *library UNUSED)
{
    for (unsigned i = 0; i < count; i++)
        kernels[i] = null_handle();
    return SUCCESS;
}
ALIAS(cudaLibraryEnumerateKernels, cuLibraryEnumerateKernels);
ALIAS(cuModuleEnumerateFunctions, cuLibraryEnumerateKernels);

int cuModuleGetLoadingMode(int *mode)
{
    enum { LAZY = 2 };
    if (!mode)
        return INVALID_VALUE;
    *mode = LAZY;
    return SUCCESS;
}

int cuFuncGetAttribute(int *value, int attribute, void *function UNUSED)
{
    enum { MAX_THREADS = 0, REGISTERS = 4, PTX = 5, BINARY = 6, MAX_DYNAMIC_SHARED = 8 };
    const struct null_target *t = null_target();
    if (!value)
        return INVALID_VALUE;
    if (!t)
        return NO_DEVICE;
    *value = attribute == MAX_THREADS                       ? (int)t->threads_per_block
             : attribute == REGISTERS                       ? 32
             : attribute == PTX || attribute == BINARY      ? (int)(t->major * 10 + t->minor)
             : attribute == MAX_DYNAMIC_SHARED              ? (int)t->shared_bytes_per_block
                                                            : 0;
    return SUCCESS;
}

int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device UNUSED)
{
    return cuFuncGetAttribute(value, attribute, kernel);
}

// cudaFuncAttributes; the reserved words after these members stay as the caller left them.
struct function_attributes {
    size_t shared, constant, local;
    int threads, registers, ptx, binary, cache_ca, dynamic_shared, carveout;
};

int cudaFuncGetAttributes(struct function_attributes *out, const void *function UNUSED)
{
    const struct null_target *t = null_target();
    if (!out || !t)
        return runtime(out ? NO_DEVICE : INVALID_VALUE);
    *out = (struct function_attributes){
        .threads = (int)t->threads_per_block,
        .registers = 32,
        .ptx = (int)(t->major * 10 + t->minor),
        .binary = (int)(t->major * 10 + t->minor),
        .dynamic_shared = (int)t->shared_bytes_per_block,
    };
    return SUCCESS;
}

static int one(int *count)
{
    if (!count)
        return INVALID_VALUE;
    *count = 1;
    return SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count) { return runtime(one(count)); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count) { return runtime(one(count)); }
int cudaOccupancyMaxActiveClusters(int *count) { return runtime(one(count)); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count) { return one(count); }
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count) { return one(count); }
int cuOccupancyMaxActiveClusters(int *count) { return one(count); }

// A tensor map is 128 bytes that only a kernel would read.
int cuTensorMapEncodeTiled(void *map)
{
    if (!map)
        return INVALID_VALUE;
    memset(map, 0, 128);
    return SUCCESS;
}
ALIAS(cuTensorMapEncodeIm2col, cuTensorMapEncodeTiled);
ALIAS(cuTensorMapEncodeIm2colWide, cuTensorMapEncodeTiled);
SUCCEEDS(cuTensorMapReplaceAddress)
