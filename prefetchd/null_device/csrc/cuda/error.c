#include "null.h"

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported on the null device"},
};

static size_t find(int code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return i;
    return sizeof errors / sizeof *errors;
}

const char *null_error_name(int code)
{
    size_t i = find(code);
    return i < sizeof errors / sizeof *errors ? errors[i].name : "cudaErrorUnknown";
}

const char *null_error_text(int code)
{
    size_t i = find(code);
    return i < sizeof errors / sizeof *errors ? errors[i].text : "unrecognized error code";
}
