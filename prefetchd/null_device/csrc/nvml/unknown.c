// Every name that NVML exports, weakly: nvml.c's own definitions win, the others answer "not supported" and are counted.
#include "../common/calls.h"

#define NVML_NOT_SUPPORTED 3

static int not_supported(struct null_call *call)
{
    null_count(call);
    return NVML_NOT_SUPPORTED;
}

#define NAME(symbol)                                      \
    __attribute__((weak)) int symbol(void);               \
    __attribute__((weak)) int symbol(void)                \
    {                                                     \
        static struct null_call call = {.name = #symbol}; \
        return not_supported(&call);                      \
    }
#include "nvml_names.inc"
