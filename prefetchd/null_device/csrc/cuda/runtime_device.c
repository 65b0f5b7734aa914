// CUDA runtime: devices, limits, errors, versions and the way to driver entry points.
#include <stdio.h>
#include <string.h>

#include "null.h"

static __thread int last_error;

int runtime(int code)
{
    if (code)
        last_error = code;
    return code;
}

int cudaGetLastError(void)
{
    int code = last_error;
    last_error = SUCCESS;
    return code;
}

int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(int code) { return null_error_name(code); }
const char *cudaGetErrorString(int code) { return null_error_text(code); }

int cudaGetDeviceCount(int *count)
{
    if (!count)
        return runtime(INVALID_VALUE);
    *count = null_target() ? 1 : 0;
    return runtime(*count ? SUCCESS : NO_DEVICE);
}

int cudaGetDevice(int *device)
{
    if (!device)
        return runtime(INVALID_VALUE);
    *device = 0;
    return runtime(null_device_ok(0));
}

int cudaSetDevice(int device) { return runtime(null_device_ok(device)); }
int cudaInitDevice(int device) { return runtime(null_device_ok(device)); }

int cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    return runtime(null_attribute(value, attribute, device));
}

// CUDA 13 has one function; in CUDA 12 it is spelled `_v2` and its structure is longer.
int cudaGetDeviceProperties(void *out, int device) { return runtime(null_properties(out, device, 13)); }
int cudaGetDeviceProperties_v2(void *out, int device) { return runtime(null_properties(out, device, 12)); }

static int version(int *out)
{
    if (!out)
        return runtime(INVALID_VALUE);
    *out = NULL_CUDA_VERSION;
    return SUCCESS;
}
int cudaDriverGetVersion(int *out) { return version(out); }
int cudaRuntimeGetVersion(int *out) { return version(out); }

int cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    if (!text || length < 13)
        return runtime(INVALID_VALUE);
    snprintf(text, (size_t)length, "%s", NULL_PCI_BUS_ID);
    return runtime(null_device_ok(device));
}

int cudaDeviceGetByPCIBusId(int *device, const char *text UNUSED) { return cudaGetDevice(device); }

int cudaDeviceCanAccessPeer(int *can, int device UNUSED, int peer UNUSED)
{
    if (!can)
        return runtime(INVALID_VALUE);
    *can = 0;
    return SUCCESS;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}

int cudaDeviceGetLimit(size_t *value, int limit UNUSED)
{
    if (!value)
        return runtime(INVALID_VALUE);
    *value = 1024;
    return SUCCESS;
}

static int zero_int(int *out)
{
    if (out)
        *out = 0;
    return SUCCESS;
}
int cudaDeviceGetCacheConfig(int *out) { return zero_int(out); }
int cudaDeviceGetSharedMemConfig(int *out) { return zero_int(out); }
int cudaGetDeviceFlags(unsigned *out) { return zero_int((int *)out); }

SUCCEEDS(cudaDeviceSynchronize)
SUCCEEDS(cudaDeviceReset)
SUCCEEDS(cudaDeviceSetLimit)
SUCCEEDS(cudaDeviceSetCacheConfig)
SUCCEEDS(cudaDeviceSetSharedMemConfig)
SUCCEEDS(cudaSetDeviceFlags)
SUCCEEDS(cudaSetValidDevices)
SUCCEEDS(cudaCtxResetPersistingL2Cache)
SUCCEEDS(cudaProfilerStart)
SUCCEEDS(cudaProfilerStop)

int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version_wanted,
                                     unsigned long long flags UNUSED, int *found)
{
    if (!function)
        return runtime(INVALID_VALUE);
    *function = null_entry(name, (int)version_wanted);
    if (found)
        *found = *function ? 0 : 1;
    return SUCCESS;
}
ALIAS(cudaGetDriverEntryPointByVersion_ptsz, cudaGetDriverEntryPointByVersion);

int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found)
{
    return cudaGetDriverEntryPointByVersion(name, function, NULL_CUDA_VERSION, flags, found);
}
ALIAS(cudaGetDriverEntryPoint_ptsz, cudaGetDriverEntryPoint);
