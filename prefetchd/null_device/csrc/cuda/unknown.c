// Every name that a driver, a runtime and cuBLAS export. The definitions are weak: the other files' own ones win, and
// what is left answers "not supported" and is counted - or, for cuBLAS, succeeds and computes nothing.
#include "../common/calls.h"
#include "null.h"

static int unsupported(struct null_call *call)
{
    null_count(call);
    return NOT_SUPPORTED;
}

#define NAME(symbol)                                  \
    __attribute__((weak)) int symbol(void);             \
    __attribute__((weak)) int symbol(void)              \
    {                                                 \
        static struct null_call call = {.name = #symbol}; \
        return unsupported(&call);                    \
    }
#include "driver_names.inc"
#undef NAME

#define NAME(symbol)                                  \
    __attribute__((weak)) int symbol(void);             \
    __attribute__((weak)) int symbol(void)              \
    {                                                 \
        static struct null_call call = {.name = #symbol}; \
        return runtime(unsupported(&call));           \
    }
#include "runtime_names.inc"
#undef NAME

#define NAME(symbol)                      \
    __attribute__((weak)) int symbol(void); \
    __attribute__((weak)) int symbol(void) { return SUCCESS; }
#include "cublas_names.inc"
