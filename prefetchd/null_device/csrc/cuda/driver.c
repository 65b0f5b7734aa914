// CUDA driver: initialisation, devices, contexts, errors and the look-up of entry points.
#include <stdio.h>
#include <string.h>

#include "null.h"

// There is one device and one context.
#define CONTEXT ((void *)0x10)

int cuInit(unsigned flags UNUSED) { return null_target() ? SUCCESS : NO_DEVICE; }

int cuDriverGetVersion(int *version)
{
    if (!version)
        return INVALID_VALUE;
    *version = NULL_CUDA_VERSION;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
    if (!device)
        return INVALID_VALUE;
    *device = 0;
    return null_device_ok(ordinal);
}

int cuDeviceGetCount(int *count)
{
    if (!count)
        return INVALID_VALUE;
    *count = null_target() ? 1 : 0;
    return SUCCESS;
}

int cuDeviceGetName(char *text, int length, int device)
{
    int result = null_device_ok(device);
    if (!result && text && length > 0)
        snprintf(text, (size_t)length, "%s", null_target()->name);
    return result;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) { return null_attribute(value, attribute, device); }

int cuDeviceComputeCapability(int *major, int *minor, int device)
{
    int result = null_device_ok(device);
    if (result || !major || !minor)
        return result ? result : INVALID_VALUE;
    *major = (int)null_target()->major;
    *minor = (int)null_target()->minor;
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t *total, int device)
{
    if (!total)
        return INVALID_VALUE;
    null_memory_info(NULL, total);
    return null_device_ok(device);
}
ALIAS(cuDeviceTotalMem, cuDeviceTotalMem_v2);

int cuDeviceGetUuid(unsigned char uuid[16], int device)
{
    if (!uuid)
        return INVALID_VALUE;
    memset(uuid, 0, 16);
    uuid[0] = NULL_UUID_BYTE;
    return null_device_ok(device);
}
ALIAS(cuDeviceGetUuid_v2, cuDeviceGetUuid);

int cuDeviceGetPCIBusId(char *text, int length, int device)
{
    if (!text || length < 13)
        return INVALID_VALUE;
    snprintf(text, (size_t)length, "%s", NULL_PCI_BUS_ID);
    return null_device_ok(device);
}
int cuDeviceGetByPCIBusId(int *device, const char *text UNUSED) { return cuDeviceGet(device, 0); }

int cuDeviceCanAccessPeer(int *can, int device UNUSED, int peer UNUSED)
{
    if (!can)
        return INVALID_VALUE;
    *can = 0;
    return SUCCESS;
}

static int context_out(void **context)
{
    if (!context)
        return INVALID_VALUE;
    *context = CONTEXT;
    return null_device_ok(0);
}
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    return null_device_ok(device) ? null_device_ok(device) : context_out(context);
}
ALIAS(cuCtxGetCurrent, context_out);
ALIAS(cuCtxCreate, context_out);
ALIAS(cuCtxCreate_v2, context_out);
ALIAS(cuCtxCreate_v3, context_out);
ALIAS(cuCtxCreate_v4, context_out);
int cuCtxPopCurrent_v2(void **context) { return context ? context_out(context) : SUCCESS; }
ALIAS(cuCtxPopCurrent, cuCtxPopCurrent_v2);
int cuStreamGetCtx(void *stream UNUSED, void **context) { return context_out(context); }
ALIAS(cuStreamGetCtx_ptsz, cuStreamGetCtx);
ALIAS(cuStreamGetCtx_v2, cuStreamGetCtx);
ALIAS(cuStreamGetCtx_v2_ptsz, cuStreamGetCtx);

int cuCtxGetDevice(int *device) { return cuDeviceGet(device, 0); }
ALIAS(cuCtxGetDevice_v2, cuCtxGetDevice);

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    if (flags)
        *flags = 0;
    if (active)
        *active = 1;
    return null_device_ok(device);
}

int cuCtxGetApiVersion(void *context UNUSED, unsigned *version)
{
    if (!version)
        return INVALID_VALUE;
    *version = NULL_CUDA_VERSION;
    return SUCCESS;
}

int cuCtxGetId(void *context UNUSED, unsigned long long *id)
{
    if (!id)
        return INVALID_VALUE;
    *id = 1;
    return SUCCESS;
}

int cuCtxGetFlags(unsigned *flags)
{
    if (!flags)
        return INVALID_VALUE;
    *flags = 0;
    return SUCCESS;
}

int cuCtxGetLimit(size_t *value, int limit UNUSED)
{
    if (!value)
        return INVALID_VALUE;
    *value = 1024;
    return SUCCESS;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return SUCCESS;
}

SUCCEEDS(cuDevicePrimaryCtxRelease)
SUCCEEDS(cuDevicePrimaryCtxRelease_v2)
SUCCEEDS(cuDevicePrimaryCtxReset)
SUCCEEDS(cuDevicePrimaryCtxReset_v2)
SUCCEEDS(cuDevicePrimaryCtxSetFlags)
SUCCEEDS(cuDevicePrimaryCtxSetFlags_v2)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxPushCurrent)
SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuCtxDestroy)
SUCCEEDS(cuCtxDestroy_v2)
SUCCEEDS(cuCtxSynchronize)
SUCCEEDS(cuCtxSynchronize_v2)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuCtxSetFlags)
SUCCEEDS(cuCtxSetCacheConfig)
SUCCEEDS(cuCtxSetSharedMemConfig)
SUCCEEDS(cuCtxResetPersistingL2Cache)
SUCCEEDS(cuProfilerStart)
SUCCEEDS(cuProfilerStop)

// There is nothing to log; the caller keeps the handle to unregister.
int cuLogsRegisterCallback(void *callback UNUSED, void *argument UNUSED, void **handle)
{
    if (handle)
        *handle = null_handle();
    return SUCCESS;
}
SUCCEEDS(cuLogsUnregisterCallback)

int cuGetErrorName(int code, const char **text)
{
    if (!text)
        return INVALID_VALUE;
    *text = null_error_name(code);
    return SUCCESS;
}

int cuGetErrorString(int code, const char **text)
{
    if (!text)
        return INVALID_VALUE;
    *text = null_error_text(code);
    return SUCCESS;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags UNUSED)
{
    if (!function)
        return INVALID_VALUE;
    *function = null_entry(name, version);
    return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    int result = cuGetProcAddress(name, function, version, flags);
    if (status)
        *status = result == SUCCESS ? 0 : 1;
    return result;
}
ALIAS(cuGetProcAddress_v2_ptsz, cuGetProcAddress_v2);
