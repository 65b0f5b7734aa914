// Streams and events, in the runtime and the driver: work is done when it is asked for, so waiting is nothing.
#include "null.h"

static int handle_out(void **out)
{
    if (!out)
        return INVALID_VALUE;
    *out = null_handle();
    return SUCCESS;
}
int cudaStreamCreate(void **stream) { return runtime(handle_out(stream)); }
int cudaStreamCreateWithFlags(void **stream) { return runtime(handle_out(stream)); }
int cudaStreamCreateWithPriority(void **stream) { return runtime(handle_out(stream)); }
int cudaEventCreate(void **event) { return runtime(handle_out(event)); }
int cudaEventCreateWithFlags(void **event) { return runtime(handle_out(event)); }
int cuStreamCreate(void **stream) { return handle_out(stream); }
int cuStreamCreateWithPriority(void **stream) { return handle_out(stream); }
int cuEventCreate(void **event) { return handle_out(event); }

#define BOTH(name)         \
    SUCCEEDS(cuda##name)   \
    SUCCEEDS(cu##name)
#define BOTH_PER_THREAD(name) \
    BOTH(name)                \
    BOTH(name##_ptsz)

BOTH_PER_THREAD(StreamSynchronize)
BOTH_PER_THREAD(StreamQuery)
BOTH_PER_THREAD(StreamWaitEvent)
BOTH_PER_THREAD(StreamSetAttribute)
BOTH_PER_THREAD(StreamCopyAttributes)
BOTH_PER_THREAD(StreamAttachMemAsync)
BOTH_PER_THREAD(EventRecord)
BOTH_PER_THREAD(EventRecordWithFlags)
BOTH(StreamDestroy)
BOTH(EventDestroy)
BOTH(EventQuery)
BOTH(EventSynchronize)
SUCCEEDS(cuStreamDestroy_v2)
SUCCEEDS(cuEventDestroy_v2)

// One millisecond for everything: an autotuner ends at once, with results that mean nothing (see site/).
static int elapsed(float *milliseconds)
{
    if (!milliseconds)
        return INVALID_VALUE;
    *milliseconds = 1.0f;
    return SUCCESS;
}
int cudaEventElapsedTime(float *milliseconds) { return runtime(elapsed(milliseconds)); }
int cudaEventElapsedTime_v2(float *milliseconds) { return runtime(elapsed(milliseconds)); }
int cuEventElapsedTime(float *milliseconds) { return elapsed(milliseconds); }
int cuEventElapsedTime_v2(float *milliseconds) { return elapsed(milliseconds); }

static int zero(void *stream UNUSED, int *out)
{
    if (!out)
        return INVALID_VALUE;
    *out = 0;
    return SUCCESS;
}
ALIAS(cudaStreamGetPriority, zero);
ALIAS(cudaStreamGetPriority_ptsz, zero);
ALIAS(cudaStreamGetFlags, zero);
ALIAS(cudaStreamGetFlags_ptsz, zero);
ALIAS(cudaStreamGetDevice, zero);
ALIAS(cudaStreamGetDevice_ptsz, zero);
ALIAS(cuStreamGetPriority, zero);
ALIAS(cuStreamGetPriority_ptsz, zero);
ALIAS(cuStreamGetFlags, zero);
ALIAS(cuStreamGetFlags_ptsz, zero);
ALIAS(cuStreamGetDevice, zero);
ALIAS(cuStreamGetDevice_ptsz, zero);

int cuStreamGetId(void *stream, unsigned long long *id)
{
    if (!id)
        return INVALID_VALUE;
    *id = (unsigned long long)(uintptr_t)stream;
    return SUCCESS;
}
ALIAS(cuStreamGetId_ptsz, cuStreamGetId);
ALIAS(cudaStreamGetId, cuStreamGetId);
ALIAS(cudaStreamGetId_ptsz, cuStreamGetId);

// Host functions in a stream run at once, on the calling thread.
int cudaLaunchHostFunc(void *stream UNUSED, void (*function)(void *), void *argument)
{
    if (!function)
        return INVALID_VALUE;
    function(argument);
    return SUCCESS;
}
ALIAS(cudaLaunchHostFunc_ptsz, cudaLaunchHostFunc);
ALIAS(cuLaunchHostFunc, cudaLaunchHostFunc);
ALIAS(cuLaunchHostFunc_ptsz, cudaLaunchHostFunc);

int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *argument, unsigned flags UNUSED)
{
    if (!function)
        return INVALID_VALUE;
    function(stream, SUCCESS, argument);
    return SUCCESS;
}
ALIAS(cudaStreamAddCallback_ptsz, cudaStreamAddCallback);
ALIAS(cuStreamAddCallback, cudaStreamAddCallback);
ALIAS(cuStreamAddCallback_ptsz, cudaStreamAddCallback);
