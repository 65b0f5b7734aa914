// NVML for one device: what frameworks ask before they believe in a CUDA platform. Every other name is in
// unknown.c.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "../common/target.h"

#define UNUSED __attribute__((unused))
#define ALIAS(spelling, function) extern __typeof__(function) spelling __attribute__((alias(#function)))
#define DEVICE ((void *)0x10)

enum {
    NVML_SUCCESS = 0,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_DRIVER_NOT_LOADED = 9,
};

// The marker by which the guard knows this library.
int prefetchd_null_nvml = 1;

static int text_out(char *out, unsigned size, const char *text)
{
    if (!out)
        return NVML_INVALID_ARGUMENT;
    if (size <= strlen(text))
        return NVML_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

int nvmlInit_v2(void) { return null_target() ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED; }
ALIAS(nvmlInit, nvmlInit_v2);
int nvmlInitWithFlags(unsigned flags UNUSED) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(int code) { return code ? "NVML error on the null device" : "Success"; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    if (!count)
        return NVML_INVALID_ARGUMENT;
    *count = null_target() ? 1 : 0;
    return NVML_SUCCESS;
}
ALIAS(nvmlDeviceGetCount, nvmlDeviceGetCount_v2);

static int device_out(void **device)
{
    if (!device)
        return NVML_INVALID_ARGUMENT;
    *device = DEVICE;
    return nvmlInit_v2();
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device)
{
    return index ? NVML_INVALID_ARGUMENT : device_out(device);
}
ALIAS(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    return uuid && !strcmp(uuid, NULL_UUID_TEXT) ? device_out(device) : NVML_NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus UNUSED, void **device) { return device_out(device); }
ALIAS(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2);

int nvmlDeviceGetIndex(void *device UNUSED, unsigned *index)
{
    if (!index)
        return NVML_INVALID_ARGUMENT;
    *index = 0;
    return NVML_SUCCESS;
}
ALIAS(nvmlDeviceGetMinorNumber, nvmlDeviceGetIndex);

int nvmlDeviceGetName(void *device UNUSED, char *out, unsigned size)
{
    return null_target() ? text_out(out, size, null_target()->name) : NVML_DRIVER_NOT_LOADED;
}
int nvmlDeviceGetUUID(void *device UNUSED, char *out, unsigned size) { return text_out(out, size, NULL_UUID_TEXT); }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text_out(out, size, NULL_DRIVER_TEXT); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return text_out(out, size, "13." NULL_DRIVER_TEXT); }

int nvmlSystemGetCudaDriverVersion(int *version)
{
    if (!version)
        return NVML_INVALID_ARGUMENT;
    *version = NULL_CUDA_VERSION;
    return NVML_SUCCESS;
}
ALIAS(nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetCudaDriverVersion);

int nvmlDeviceGetCudaComputeCapability(void *device UNUSED, int *major, int *minor)
{
    if (!null_target())
        return NVML_DRIVER_NOT_LOADED;
    if (!major || !minor)
        return NVML_INVALID_ARGUMENT;
    *major = (int)null_target()->major;
    *minor = (int)null_target()->minor;
    return NVML_SUCCESS;
}

// What is allocated is known to the CUDA library, if the process has it.
static unsigned long long used_bytes(void)
{
    size_t available, total;
    int (*memory_info)(size_t *, size_t *) = (int (*)(size_t *, size_t *))dlsym(RTLD_DEFAULT, "cuMemGetInfo_v2");
    if (!dlsym(RTLD_DEFAULT, "prefetchd_null_device") || !memory_info || memory_info(&available, &total))
        return 0;
    return total - available;
}

int nvmlDeviceGetMemoryInfo(void *device UNUSED, unsigned long long total_free_used[3])
{
    if (!null_target())
        return NVML_DRIVER_NOT_LOADED;
    if (!total_free_used)
        return NVML_INVALID_ARGUMENT;
    unsigned long long total = (unsigned long long)null_target()->memory_bytes, used = used_bytes();
    total_free_used[0] = total;
    total_free_used[1] = total - used;
    total_free_used[2] = used;
    return NVML_SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, available, used;
};
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory_v2 *out)
{
    unsigned long long values[3];
    int result = nvmlDeviceGetMemoryInfo(device, values);
    if (result || !out)
        return result ? result : NVML_INVALID_ARGUMENT;
    out->total = values[0];
    out->reserved = 0;
    out->available = values[1];
    out->used = values[2];
    return NVML_SUCCESS;
}

struct pci {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};
int nvmlDeviceGetPciInfo_v3(void *device UNUSED, struct pci *out)
{
    if (!out)
        return NVML_INVALID_ARGUMENT;
    *out = (struct pci){.bus = 1};
    strcpy(out->bus_id_legacy, NULL_PCI_BUS_ID);
    strcpy(out->bus_id, NULL_NVML_PCI_BUS_ID);
    return NVML_SUCCESS;
}
ALIAS(nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3);
ALIAS(nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v3);

// "No MIG": a current and a pending mode of 0. Some callers stop at an error here.
int nvmlDeviceGetMigMode(void *device UNUSED, unsigned *current, unsigned *pending)
{
    if (current)
        *current = 0;
    if (pending)
        *pending = 0;
    return NVML_SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *one UNUSED, void *other UNUSED, int index UNUSED, int *status)
{
    enum { P2P_NOT_SUPPORTED = 5 };
    if (!status)
        return NVML_INVALID_ARGUMENT;
    *status = P2P_NOT_SUPPORTED;
    return NVML_SUCCESS;
}
