// Drives the null device's library through dlopen, as a program would, and ends at the first wrong answer.
// test_null_shim.py compiles it and the library with a sanitizer and runs it with one of the modes below.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                            \
        }                                                                       \
    } while (0)

static void *shim;

static void *entry(const char *name)
{
    void *found = dlsym(shim, name);
    if (!found) {
        fprintf(stderr, "no symbol %s\n", name);
        exit(1);
    }
    return found;
}

// Any entry point whose arguments are pointers, sizes and ints: all are passed in integer registers.
typedef int (*function)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);
#define CALL8(name, a, b, c, d, e, f, g, h)                                                                       \
    ((function)entry(name))((uintptr_t)(a), (uintptr_t)(b), (uintptr_t)(c), (uintptr_t)(d), (uintptr_t)(e), \
                            (uintptr_t)(f), (uintptr_t)(g), (uintptr_t)(h))
#define CALL(name, a, b, c) CALL8(name, a, b, c, 0, 0, 0, 0, 0)

static size_t free_memory(void)
{
    size_t available, total;
    CHECK(CALL("cudaMemGetInfo", &available, &total, 0) == 0);
    CHECK(total == 1 << 30);
    size_t driver_available;
    CHECK(CALL("cuMemGetInfo_v2", &driver_available, &total, 0) == 0 && driver_available == available);
    return available;
}

static void memory_is_bounded_and_released(void)
{
    char *one, *two;
    CHECK(free_memory() == 1 << 30);
    CHECK(CALL("cudaMalloc", &one, 768 << 20, 0) == 0);
    CHECK(CALL("cudaMalloc", &two, 512 << 20, 0) == 2 && two == NULL);
    CHECK(CALL("cudaGetLastError", 0, 0, 0) == 2);
    CHECK(CALL("cudaGetLastError", 0, 0, 0) == 0);
    CHECK(CALL("cuMemAlloc_v2", &two, 512 << 20, 0) == 2);
    CHECK(CALL("cudaMalloc", &two, SIZE_MAX - 10, 0) == 2);
    CHECK(free_memory() == 256 << 20);
    CHECK(CALL("cudaFree", one + 4096, 0, 0) == 1);
    CHECK(CALL("cudaFreeHost", one, 0, 0) == 1);
    CHECK(CALL("cudaFree", one, 0, 0) == 0);
    CHECK(CALL("cudaFree", one, 0, 0) == 1);
    CHECK(CALL("cudaFree", NULL, 0, 0) == 0);
    CHECK(CALL("cudaMalloc", &two, 512 << 20, 0) == 0);
    CHECK(CALL("cuMemFree_v2", two, 0, 0) == 0);
    CHECK(CALL("cudaHostAlloc", &one, (size_t)2 << 30, 0) == 0); // host memory is not the device's
    CHECK(free_memory() == 1 << 30);
    CHECK(CALL("cudaFreeHost", one, 0, 0) == 0);
    CHECK(CALL("cudaMalloc", &one, 0, 0) == 0 && one == NULL);
}

static void copies_and_fills_are_real(void)
{
    char *device, text[64] = "from the host", back[64] = "";
    CHECK(CALL("cudaMalloc", &device, 16 << 20, 0) == 0);
    CHECK(CALL8("cudaMemcpyAsync", device + 100, text, sizeof text, 1, 0, 0, 0, 0) == 0);
    CHECK(CALL("cuMemcpyDtoD_v2", device + 300, device + 100, sizeof text) == 0);
    CHECK(CALL("cuMemcpyDtoHAsync_v2_ptsz", back, device + 300, sizeof back) == 0);
    CHECK(!strcmp(back, text));
    CHECK(CALL("cudaMemcpy", NULL, text, 4) == 1);
    CHECK(CALL8("cudaMemcpy2D", back, 8, device + 100, 4, 4, 2, 2, 0) == 0);
    CHECK(!memcmp(back, "from", 4) && !memcmp(back + 8, " the", 4));
    CHECK(CALL8("cudaMemcpy2D", back, 2, device + 100, 4, 4, 2, 2, 0) == 1); // rows wider than the pitch

    // A large zero fill returns pages; what lies beside it must stay.
    memset(device, 7, 16 << 20);
    CHECK(CALL("cudaMemset", device + 10, 0, 8 << 20) == 0);
    CHECK(device[9] == 7 && device[10] == 0 && device[9 + (8 << 20)] == 0 && device[10 + (8 << 20)] == 7);
    for (size_t i = 10; i < 10 + (8 << 20); i++)
        CHECK(device[i] == 0);
    CHECK(CALL("cuMemsetD32_v2", device, 0x01020304, 3) == 0);
    CHECK(((unsigned *)device)[2] == 0x01020304 && device[12] == 0);
    CHECK(CALL("cuMemsetD16Async", device, 0x0506, 2) == 0 && ((unsigned *)device)[0] == 0x05060506);
    CHECK(CALL8("cudaMemset2D", device, 100, 9, 10, 2, 0, 0, 0) == 0 && device[109] == 9 && device[99] != 9);
    CHECK(CALL("cudaFree", device, 0, 0) == 0);
}

static void pointers_tell_where_they_are(void)
{
    struct {
        int type, device;
        void *device_pointer, *host_pointer;
        char canary[8];
    } attributes;
    char *device, *host, ordinary[16];
    unsigned type;
    CHECK(CALL("cudaMalloc", &device, 8192, 0) == 0 && CALL("cudaMallocHost", &host, 8192, 0) == 0);
    memset(attributes.canary, 3, 8);
    CHECK(CALL("cudaPointerGetAttributes", &attributes, device + 8000, 0) == 0 && attributes.type == 2);
    CHECK(CALL("cudaPointerGetAttributes", &attributes, host + 1, 0) == 0 && attributes.type == 1);
    CHECK(CALL("cudaPointerGetAttributes", &attributes, ordinary, 0) == 0 && attributes.type == 0);
    CHECK(attributes.canary[0] == 3);
    CHECK(CALL("cuPointerGetAttribute", &type, 2, device) == 0 && type == 2);
    CHECK(CALL("cuPointerGetAttribute", &type, 2, host) == 0 && type == 1);
    CHECK(CALL("cuPointerGetAttribute", &type, 2, ordinary) == 1);
    CHECK(CALL("cudaHostRegister", ordinary, sizeof ordinary, 0) == 0);
    CHECK(CALL("cudaPointerGetAttributes", &attributes, ordinary, 0) == 0 && attributes.type == 1);
    CHECK(CALL("cudaHostUnregister", ordinary, 0, 0) == 0);
    CHECK(CALL("cudaFree", device, 0, 0) == 0 && CALL("cudaFreeHost", host, 0, 0) == 0);
    CHECK(CALL("cudaPointerGetAttributes", &attributes, device, 0) == 0 && attributes.type == 0);
}

static int at(const unsigned char *bytes, size_t offset)
{
    int value;
    memcpy(&value, bytes + offset, sizeof value);
    return value;
}

// Offsets taken from the headers of CUDA 12.9 and 13.0 by hand: they check the generated tables.
static void properties_have_both_layouts(void)
{
    unsigned char bytes[1100];
    memset(bytes, 0xee, sizeof bytes);
    CHECK(CALL("cudaGetDeviceProperties_v2", bytes, 0, 0) == 0);
    CHECK(!strcmp((char *)bytes, "Test device") && at(bytes, 360) == 9 && at(bytes, 388) == 77 && at(bytes, 616) == 1234567);
    CHECK(bytes[1031] == 0 && bytes[1032] == 0xee);
    memset(bytes, 0xee, sizeof bytes);
    CHECK(CALL("cudaGetDeviceProperties", bytes, 0, 0) == 0);
    CHECK(!strcmp((char *)bytes, "Test device") && at(bytes, 596) == 1234567);
    CHECK(bytes[1007] == 0 && bytes[1008] == 0xee);
    CHECK(CALL("cudaGetDeviceProperties", bytes, 1, 0) == 101);
    int value;
    CHECK(CALL("cuDeviceGetAttribute", &value, 16, 0) == 0 && value == 77);
    CHECK(CALL("cudaDeviceGetAttribute", &value, 97, 0) == 0 && value == 232448);
}

static void unknown_calls_are_counted(void)
{
    size_t (*calls)(char *, size_t) = (size_t(*)(char *, size_t))entry("prefetchd_null_calls");
    char text[256], small[8];
    CHECK(calls(text, sizeof text) == 0 && !*text);
    CHECK(CALL("cuMulticastCreate", 0, 0, 0) == 801);
    CHECK(CALL("cudaGraphAddKernelNode", 0, 0, 0) == 801);
    CHECK(CALL("cudaPeekAtLastError", 0, 0, 0) == 801);
    CHECK(CALL("cuMulticastCreate", 0, 0, 0) == 801);
    size_t length = calls(text, sizeof text);
    CHECK(length == strlen(text) && strstr(text, "cuMulticastCreate 2\n") && strstr(text, "cudaGraphAddKernelNode 1\n"));
    CHECK(calls(small, sizeof small) == length && strlen(small) == sizeof small - 1);
    CHECK(CALL("cublasSgemm_v2", 0, 0, 0) == 0);
    CHECK(calls(NULL, 0) == length);
}

static void entry_points_are_found_by_name(void)
{
    void *found;
    int status;
    CHECK(CALL8("cuGetProcAddress_v2", "cuMemAlloc", &found, 13000, 0, &status, 0, 0, 0) == 0);
    CHECK(found == entry("cuMemAlloc_v2") && status == 0);
    CHECK(CALL8("cuGetProcAddress_v2", "cuGetProcAddress", &found, 11030, 0, NULL, 0, 0, 0) == 0);
    CHECK(found == entry("cuGetProcAddress"));
    CHECK(CALL8("cuGetProcAddress_v2", "cuNothing", &found, 13000, 0, &status, 0, 0, 0) == 500 && !found && status == 1);
    CHECK(CALL8("cudaGetDriverEntryPointByVersion", "cuLaunchKernelEx", &found, 12080, 0, &status, 0, 0, 0) == 0);
    CHECK(found == entry("cuLaunchKernelEx") && status == 0);
    CHECK(CALL8("cudaGetDriverEntryPointByVersion", "malloc", &found, 12080, 0, &status, 0, 0, 0) == 0 && status == 1);
}

static void captures_are_remembered_by_stream(void)
{
    int status;
    unsigned long long id;
    void *graph;
    CHECK(CALL("cudaStreamIsCapturing", 0x10, &status, 0) == 0 && status == 0);
    CHECK(CALL("cudaStreamBeginCapture", 0x10, 0, 0) == 0);
    CHECK(CALL("cudaStreamBeginCapture", 0x10, 0, 0) != 0);
    CHECK(CALL("cuStreamGetCaptureInfo_v3", 0x10, &status, &id) == 0 && status == 1 && id);
    CHECK(CALL("cudaStreamIsCapturing", 0x20, &status, 0) == 0 && status == 0);
    CHECK(CALL("cudaStreamEndCapture", 0x10, &graph, 0) == 0 && graph);
    CHECK(CALL("cudaStreamIsCapturing", 0x10, &status, 0) == 0 && status == 0);
    CHECK(CALL("cudaStreamEndCapture", 0x10, &graph, 0) == 1);
}

static void virtual_memory_is_mapped_and_counted(void)
{
    const size_t page = 2 << 20;
    char *address;
    void *one, *two;
    size_t granularity;
    unsigned type;
    CHECK(CALL("cuMemGetAllocationGranularity", &granularity, NULL, 0) == 0 && granularity == page);
    CHECK(CALL("cuMemAddressReserve", &address, (size_t)4 << 30, 0) == 0);
    CHECK(CALL("cuMemCreate", &two, 2 * page, 0) == 0);
    CHECK(CALL("cuMemCreate", &one, (size_t)2 << 30, 0) == 2);
    CHECK(CALL("cuMemCreate", &one, 100, 0) == 1);
    CHECK(CALL("cuMemCreate", &one, page, 0) == 0);
    CHECK(free_memory() == (1 << 30) - 3 * page);
    CHECK(CALL8("cuMemMap", address, page, 0, one, 0, 0, 0, 0) == 0);
    CHECK(CALL8("cuMemMap", address + page, 2 * page, 0, two, 0, 0, 0, 0) == 0);
    CHECK(CALL("cuMemSetAccess", address, 3 * page, NULL) == 0);
    CHECK(CALL("cuMemRelease", one, 0, 0) == 0);
    CHECK(CALL("cuMemsetD8_v2", address, 5, 3 * page) == 0 && address[3 * page - 1] == 5);
    CHECK(CALL("cuPointerGetAttribute", &type, 2, address + page) == 0 && type == 2);
    CHECK(CALL("cudaFree", address, 0, 0) == 1);
    CHECK(free_memory() == (1 << 30) - 3 * page);
    CHECK(CALL("cuMemUnmap", address, 3 * page, 0) == 0);
    CHECK(free_memory() == (1 << 30) - 2 * page); // the second is unmapped, not released
    CHECK(CALL8("cuMemMap", address, 2 * page, 0, two, 0, 0, 0, 0) == 0 && *address == 0);
    CHECK(CALL("cuMemUnmap", address, 2 * page, 0) == 0 && CALL("cuMemRelease", two, 0, 0) == 0);
    CHECK(free_memory() == 1 << 30);
    CHECK(CALL("cuMemUnmap", address, page, 0) == 1);
    CHECK(CALL("cuMemAddressFree", address, (size_t)4 << 30, 0) == 0);
}

static void symbols_have_bytes(void)
{
    static char host_symbol;
    char text[8] = "symbol", back[8];
    char *device;
    CHECK(CALL8("__cudaRegisterVar", 0, &host_symbol, 0, "name", 0, 8, 0, 0) >= 0);
    CHECK(CALL8("cudaMemcpyToSymbol", &host_symbol, text, 8, 0, 1, 0, 0, 0) == 0);
    CHECK(CALL8("cudaMemcpyToSymbol", &host_symbol, text, 8, 1, 1, 0, 0, 0) == 1);
    CHECK(CALL("cudaGetSymbolAddress", &device, &host_symbol, 0) == 0 && !strcmp(device, "symbol"));
    CHECK(CALL8("cudaMemcpyFromSymbol", back, &host_symbol, 8, 0, 2, 0, 0, 0) == 0 && !strcmp(back, "symbol"));
    CHECK(CALL("cudaGetSymbolAddress", &device, &text, 0) == 500);
    CHECK(CALL("cudaFree", device, 0, 0) == 0);
}

#define THREADS 8
#define ROUNDS 300

static void *work(void *argument)
{
    unsigned char mark = (unsigned char)(uintptr_t)argument;
    for (int round = 0; round < ROUNDS; round++) {
        unsigned char *device, byte;
        CHECK(CALL("cudaMalloc", &device, 4096 * (1 + round % 5), 0) == 0);
        CHECK(CALL("cudaMemset", device, mark, 4096) == 0);
        CHECK(CALL8("cudaMemcpy", &byte, device + 4095, 1, 2, 0, 0, 0, 0) == 0 && byte == mark);
        CHECK(CALL("cuMulticastBindMem", 0, 0, 0) == 801);
        CHECK(CALL("cudaGraphAddHostNode", 0, 0, 0) == 801);
        CHECK(CALL("cudaGetLastError", 0, 0, 0) == 801);
        CHECK(CALL("cudaStreamBeginCapture", device, 0, 0) == 0 && CALL("cudaStreamEndCapture", device, 0, 0) == 0);
        CHECK(CALL("cudaFree", device, 0, 0) == 0);
    }
    return NULL;
}

static void threads_do_not_disturb_each_other(void)
{
    pthread_t threads[THREADS];
    size_t before = free_memory();
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], NULL, work, (void *)(i + 1)));
    for (int i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    CHECK(free_memory() == before);
    char text[256], wanted[64];
    ((size_t(*)(char *, size_t))entry("prefetchd_null_calls"))(text, sizeof text);
    snprintf(wanted, sizeof wanted, "cuMulticastBindMem %d\n", THREADS * ROUNDS);
    CHECK(strstr(text, wanted));
}

static void a_forked_child_can_allocate(void)
{
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, work, (void *)1));
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            char *device;
            alarm(20); // a lock left held by the fork would hang here
            _exit(CALL("cudaMalloc", &device, 4096, 0) || CALL("cudaFree", device, 0, 0));
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(!pthread_join(thread, NULL));
}

static void without_a_target_there_is_no_device(void)
{
    int count = -1;
    void *device;
    CHECK(CALL("cudaGetDeviceCount", &count, 0, 0) == 100 && count == 0);
    CHECK(CALL("cuInit", 0, 0, 0) == 100);
    CHECK(CALL("cudaMalloc", &device, 16, 0) == 2);
}

int main(int count, char **arguments)
{
    CHECK(count == 3);
    shim = dlopen(arguments[1], RTLD_NOW);
    if (!shim) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    if (!strcmp(arguments[2], "no-target")) {
        without_a_target_there_is_no_device();
    } else if (!strcmp(arguments[2], "threads")) {
        threads_do_not_disturb_each_other();
    } else {
        unknown_calls_are_counted();
        memory_is_bounded_and_released();
        copies_and_fills_are_real();
        pointers_tell_where_they_are();
        properties_have_both_layouts();
        entry_points_are_found_by_name();
        captures_are_remembered_by_stream();
        virtual_memory_is_mapped_and_counted();
        symbols_have_bytes();
        a_forked_child_can_allocate();
    }
    puts("done");
    return 0;
}
