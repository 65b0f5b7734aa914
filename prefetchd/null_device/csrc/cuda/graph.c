// CUDA graphs: a capture is remembered by its stream, so that "is it capturing" is answered truly; what is captured
// runs at once like everything else, and launching a graph does nothing.
#include <pthread.h>

#include "null.h"

// More streams capturing at the same time than any program has; one more is "not supported".
#define MAX_CAPTURES 64
enum { IDLE = 0, ACTIVE = 1 };

static struct {
    void *stream;
    unsigned long long id;
} captures[MAX_CAPTURES];
static unsigned long long next_id;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_FORKED_CHILD(lock)

// The slot of a capturing stream, or of a free one when `id` is 0. Called with the lock held.
static int slot(void *stream, bool capturing)
{
    for (int i = 0; i < MAX_CAPTURES; i++)
        if (capturing ? captures[i].id && captures[i].stream == stream : !captures[i].id)
            return i;
    return -1;
}

int cuStreamBeginCapture(void *stream)
{
    pthread_mutex_lock(&lock);
    int free_slot = slot(stream, true) >= 0 ? -1 : slot(stream, false);
    if (free_slot >= 0) {
        captures[free_slot].stream = stream;
        captures[free_slot].id = ++next_id;
    }
    pthread_mutex_unlock(&lock);
    return free_slot >= 0 ? SUCCESS : NOT_SUPPORTED;
}
ALIAS(cuStreamBeginCapture_ptsz, cuStreamBeginCapture);
ALIAS(cuStreamBeginCapture_v2, cuStreamBeginCapture);
ALIAS(cuStreamBeginCapture_v2_ptsz, cuStreamBeginCapture);
ALIAS(cuStreamBeginCaptureToGraph, cuStreamBeginCapture);
ALIAS(cuStreamBeginCaptureToGraph_ptsz, cuStreamBeginCapture);
ALIAS(cudaStreamBeginCapture, cuStreamBeginCapture);
ALIAS(cudaStreamBeginCapture_ptsz, cuStreamBeginCapture);
ALIAS(cudaStreamBeginCaptureToGraph, cuStreamBeginCapture);
ALIAS(cudaStreamBeginCaptureToGraph_ptsz, cuStreamBeginCapture);

int cuStreamEndCapture(void *stream, void **graph)
{
    pthread_mutex_lock(&lock);
    int found = slot(stream, true);
    if (found >= 0)
        captures[found].id = 0;
    pthread_mutex_unlock(&lock);
    if (graph)
        *graph = found >= 0 ? null_handle() : NULL;
    return found >= 0 ? SUCCESS : INVALID_VALUE;
}
ALIAS(cuStreamEndCapture_ptsz, cuStreamEndCapture);
ALIAS(cudaStreamEndCapture, cuStreamEndCapture);
ALIAS(cudaStreamEndCapture_ptsz, cuStreamEndCapture);

// The versions differ in what follows `id`; those outputs mean nothing here and are left alone.
int cuStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id)
{
    pthread_mutex_lock(&lock);
    int found = slot(stream, true);
    unsigned long long capture = found >= 0 ? captures[found].id : 0;
    pthread_mutex_unlock(&lock);
    if (!status)
        return INVALID_VALUE;
    *status = capture ? ACTIVE : IDLE;
    if (id)
        *id = capture;
    return SUCCESS;
}
ALIAS(cuStreamGetCaptureInfo_ptsz, cuStreamGetCaptureInfo);
ALIAS(cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo);
ALIAS(cuStreamGetCaptureInfo_v2_ptsz, cuStreamGetCaptureInfo);
ALIAS(cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo);
ALIAS(cuStreamGetCaptureInfo_v3_ptsz, cuStreamGetCaptureInfo);
ALIAS(cudaStreamGetCaptureInfo, cuStreamGetCaptureInfo);
ALIAS(cudaStreamGetCaptureInfo_ptsz, cuStreamGetCaptureInfo);
ALIAS(cudaStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo);
ALIAS(cudaStreamGetCaptureInfo_v2_ptsz, cuStreamGetCaptureInfo);
ALIAS(cudaStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo);
ALIAS(cudaStreamGetCaptureInfo_v3_ptsz, cuStreamGetCaptureInfo);

int cuStreamIsCapturing(void *stream, int *status) { return cuStreamGetCaptureInfo(stream, status, NULL); }
ALIAS(cuStreamIsCapturing_ptsz, cuStreamIsCapturing);
ALIAS(cudaStreamIsCapturing, cuStreamIsCapturing);
ALIAS(cudaStreamIsCapturing_ptsz, cuStreamIsCapturing);

SUCCEEDS(cudaThreadExchangeStreamCaptureMode)
SUCCEEDS(cuThreadExchangeStreamCaptureMode)

static int handle_out(void **out)
{
    if (!out)
        return INVALID_VALUE;
    *out = null_handle();
    return SUCCESS;
}
ALIAS(cudaGraphCreate, handle_out);
ALIAS(cuGraphCreate, handle_out);
ALIAS(cudaGraphInstantiate, handle_out);
ALIAS(cudaGraphInstantiateWithFlags, handle_out);
ALIAS(cudaGraphInstantiateWithParams, handle_out);
ALIAS(cudaGraphInstantiateWithParams_ptsz, handle_out);
ALIAS(cuGraphInstantiate, handle_out);
ALIAS(cuGraphInstantiate_v2, handle_out);
ALIAS(cuGraphInstantiateWithFlags, handle_out);
ALIAS(cuGraphInstantiateWithParams, handle_out);
ALIAS(cuGraphInstantiateWithParams_ptsz, handle_out);
ALIAS(cudaUserObjectCreate, handle_out);
ALIAS(cuUserObjectCreate, handle_out);

// A graph is never reported empty: programs warn about that.
int cudaGraphGetNodes(void *graph UNUSED, void **nodes, size_t *count)
{
    if (!count)
        return INVALID_VALUE;
    if (nodes && *count)
        nodes[0] = null_handle();
    *count = 1;
    return SUCCESS;
}
ALIAS(cuGraphGetNodes, cudaGraphGetNodes);

#define BOTH(name)       \
    SUCCEEDS(cuda##name) \
    SUCCEEDS(cu##name)
BOTH(StreamUpdateCaptureDependencies)
BOTH(StreamUpdateCaptureDependencies_ptsz)
BOTH(StreamUpdateCaptureDependencies_v2)
BOTH(StreamUpdateCaptureDependencies_v2_ptsz)
BOTH(GraphLaunch)
BOTH(GraphLaunch_ptsz)
BOTH(GraphUpload)
BOTH(GraphUpload_ptsz)
BOTH(GraphDestroy)
BOTH(GraphExecDestroy)
BOTH(GraphDebugDotPrint)
BOTH(GraphRetainUserObject)
BOTH(GraphReleaseUserObject)
BOTH(UserObjectRetain)
BOTH(UserObjectRelease)
