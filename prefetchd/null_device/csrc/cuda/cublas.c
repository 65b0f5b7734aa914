// cuBLAS and cuBLASLt: the few entry points with an output. All others succeed and compute nothing (unknown.c).
#include <string.h>

#include "null.h"

// Not below the cuBLAS of any CUDA line in the tables.
#define CUBLAS_VERSION 130100

// Handles and descriptors are opaque; this block stands for all of them, in case somebody copies one.
static char opaque[4096];

static int opaque_out(void **out)
{
    if (!out)
        return INVALID_VALUE;
    *out = opaque;
    return SUCCESS;
}
ALIAS(cublasCreate_v2, opaque_out);
ALIAS(cublasLtCreate, opaque_out);
ALIAS(cublasXtCreate, opaque_out);
ALIAS(cublasLtMatmulDescCreate, opaque_out);
ALIAS(cublasLtMatmulPreferenceCreate, opaque_out);
ALIAS(cublasLtMatrixLayoutCreate, opaque_out);
ALIAS(cublasLtMatrixTransformDescCreate, opaque_out);

int cublasGetVersion_v2(void *handle UNUSED, int *version)
{
    if (version)
        *version = CUBLAS_VERSION;
    return SUCCESS;
}
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasGetCudartVersion(void) { return NULL_CUDA_VERSION; }
size_t cublasLtGetCudartVersion(void) { return NULL_CUDA_VERSION; }

int cublasGetProperty(int property, int *value)
{
    static const int parts[] = {CUBLAS_VERSION / 10000, CUBLAS_VERSION / 100 % 100, CUBLAS_VERSION % 100};
    if (!value || property < 0 || property > 2)
        return INVALID_VALUE;
    *value = parts[property];
    return SUCCESS;
}
ALIAS(cublasLtGetProperty, cublasGetProperty);

const char *cublasGetStatusString(int status) { return status ? "null device: cuBLAS error" : "the operation succeeded"; }
ALIAS(cublasGetStatusName, cublasGetStatusString);
ALIAS(cublasLtGetStatusString, cublasGetStatusString);
ALIAS(cublasLtGetStatusName, cublasGetStatusString);

static int zero_out(void *handle UNUSED, int *value)
{
    if (value)
        *value = 0;
    return SUCCESS;
}
ALIAS(cublasGetMathMode, zero_out);
ALIAS(cublasGetPointerMode_v2, zero_out);
ALIAS(cublasGetAtomicsMode, zero_out);
ALIAS(cublasGetSmCountTarget, zero_out);

int cublasGetStream_v2(void *handle UNUSED, void **stream)
{
    if (stream)
        *stream = NULL;
    return SUCCESS;
}

// cublasLtMatmulHeuristicResult_t: an algorithm, a workspace size of 0, the status "success", no waves.
#define HEURISTIC_BYTES 96

int cublasLtMatmulAlgoGetHeuristic(void *handle UNUSED, void *operation UNUSED, void *a UNUSED, void *b UNUSED,
                                   void *c UNUSED, void *d UNUSED, void *preference UNUSED, int requested,
                                   void *results, int *returned)
{
    if (!results || !returned || requested < 1)
        return INVALID_VALUE;
    memset(results, 0, HEURISTIC_BYTES);
    *returned = 1;
    return SUCCESS;
}

int cublasLtMatmulAlgoCheck(void *handle UNUSED, void *operation UNUSED, void *a UNUSED, void *b UNUSED,
                            void *c UNUSED, void *d UNUSED, void *algorithm UNUSED, void *result)
{
    if (result)
        memset(result, 0, HEURISTIC_BYTES);
    return SUCCESS;
}

int cublasLtMatmulAlgoGetIds(void *handle UNUSED, int compute UNUSED, int scale UNUSED, int a UNUSED, int b UNUSED,
                             int c UNUSED, int d UNUSED, int requested, int *ids, int *returned)
{
    if (!ids || !returned || requested < 1)
        return INVALID_VALUE;
    ids[0] = 0;
    *returned = 1;
    return SUCCESS;
}

static int attribute_out(const void *object UNUSED, int attribute UNUSED, void *value, size_t size, size_t *written)
{
    if (value && size)
        memset(value, 0, size);
    if (written)
        *written = size;
    return SUCCESS;
}
ALIAS(cublasLtMatmulAlgoConfigGetAttribute, attribute_out);
ALIAS(cublasLtMatmulAlgoCapGetAttribute, attribute_out);
ALIAS(cublasLtMatmulDescGetAttribute, attribute_out);
ALIAS(cublasLtMatmulPreferenceGetAttribute, attribute_out);
ALIAS(cublasLtMatrixLayoutGetAttribute, attribute_out);
