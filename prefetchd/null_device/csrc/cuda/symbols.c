// Variables that a program declares on the device: the compiler registers each with its size before main, and here
// it gets real bytes at its first use. Registered kernels need nothing: a launch does nothing.
#include <pthread.h>
#include <stdlib.h>

#include "null.h"

struct symbol {
    const void *host;
    size_t size;
    void *device;
    struct symbol *next;
};

static struct symbol *symbols;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_FORKED_CHILD(lock)

void __cudaRegisterVar(void **binary UNUSED, char *host, char *device UNUSED, const char *name UNUSED,
                       int external UNUSED, size_t size, int constant UNUSED, int global UNUSED)
{
    struct symbol *symbol = calloc(1, sizeof *symbol);
    if (!symbol)
        return; // the symbol then is "not found" when it is used
    symbol->host = host;
    symbol->size = size;
    pthread_mutex_lock(&lock);
    symbol->next = symbols;
    symbols = symbol;
    pthread_mutex_unlock(&lock);
}

// One fixed non-null cell serves every registered binary; unregistering is then nothing as well.
static void *binary_cell;
void **__cudaRegisterFatBinary(void *binary UNUSED) { return &binary_cell; }
void __cudaRegisterFatBinaryEnd(void **binary UNUSED) {}
void __cudaUnregisterFatBinary(void **binary UNUSED) {}
char __cudaInitModule(void **binary UNUSED) { return 1; }
SUCCEEDS(__cudaRegisterFunction)
SUCCEEDS(__cudaRegisterManagedVar)
SUCCEEDS(__cudaRegisterHostVar)
SUCCEEDS(__cudaRegisterTexture)
SUCCEEDS(__cudaRegisterSurface)

static int address(const void *host, char **out, size_t *size)
{
    int result = NOT_FOUND;
    pthread_mutex_lock(&lock);
    for (struct symbol *symbol = symbols; symbol; symbol = symbol->next) {
        if (symbol->host != host)
            continue;
        result = symbol->device ? SUCCESS : null_allocate(&symbol->device, symbol->size, DEVICE_MEMORY);
        *out = symbol->device;
        *size = symbol->size;
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cudaGetSymbolAddress(void **out, const void *host)
{
    size_t size;
    char *device = NULL;
    if (!out)
        return runtime(INVALID_VALUE);
    int result = address(host, &device, &size);
    *out = device;
    return runtime(result);
}

int cudaGetSymbolSize(size_t *out, const void *host)
{
    char *device = NULL;
    return runtime(out ? address(host, &device, out) : INVALID_VALUE);
}

int cudaMemcpyToSymbol(const void *host, const void *from, size_t count, size_t offset, int kind UNUSED)
{
    size_t size;
    char *device = NULL;
    int result = address(host, &device, &size);
    if (!result && (offset > size || count > size - offset))
        result = INVALID_VALUE;
    return runtime(result ? result : null_copy(device + offset, from, count));
}
ALIAS(cudaMemcpyToSymbol_ptds, cudaMemcpyToSymbol);

int cudaMemcpyFromSymbol(void *to, const void *host, size_t count, size_t offset, int kind UNUSED)
{
    size_t size;
    char *device = NULL;
    int result = address(host, &device, &size);
    if (!result && (offset > size || count > size - offset))
        result = INVALID_VALUE;
    return runtime(result ? result : null_copy(to, device + offset, count));
}
ALIAS(cudaMemcpyFromSymbol_ptds, cudaMemcpyFromSymbol);

int cudaMemcpyToSymbolAsync(const void *host, const void *from, size_t count, size_t offset, int kind,
                            void *stream UNUSED)
{
    return cudaMemcpyToSymbol(host, from, count, offset, kind);
}
ALIAS(cudaMemcpyToSymbolAsync_ptsz, cudaMemcpyToSymbolAsync);

int cudaMemcpyFromSymbolAsync(void *to, const void *host, size_t count, size_t offset, int kind, void *stream UNUSED)
{
    return cudaMemcpyFromSymbol(to, host, count, offset, kind);
}
ALIAS(cudaMemcpyFromSymbolAsync_ptsz, cudaMemcpyFromSymbolAsync);
