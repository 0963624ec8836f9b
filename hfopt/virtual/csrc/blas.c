/*
 * cuBLAS and cuBLASLt calls that must hand something back, and the matrix products
 * themselves, which the journal notes with their shapes. All the others are generated
 * stubs that return success.
 */
#include <stdlib.h>
#include <string.h>

#include "nohalf.h"
#include <cublasLt.h>
#include <cublas_v2.h>

#include "card.h"
#include "journal.h"

API cublasStatus_t cublasCreate_v2(cublasHandle_t *h) { *h = calloc(1, 64); return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { free(h); return CUBLAS_STATUS_SUCCESS; }
API cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *m)
{
    *m = *(cublasMath_t *)h;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m)
{
    *(cublasMath_t *)h = m;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *m)
{
    *m = ((cublasPointerMode_t *)h)[1];
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m)
{
    ((cublasPointerMode_t *)h)[1] = m;
    return CUBLAS_STATUS_SUCCESS;
}

/* what the journal wants to know of a matrix */
typedef struct { cudaDataType type; uint64_t rows, columns; int32_t count; } layout;

static cublasStatus_t opaque(void *out)
{
    *(void **)out = calloc(1, 1024);
    return CUBLAS_STATUS_SUCCESS;
}
static cublasStatus_t drop(void *p)
{
    free(p);
    return CUBLAS_STATUS_SUCCESS;
}

API cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) { return opaque(h); }
API cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) { return drop(h); }
API cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c, cudaDataType_t s)
{
    (void)c; (void)s;
    return opaque(d);
}
API cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return drop(d); }
API cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType t, uint64_t r, uint64_t c, int64_t ld)
{
    (void)ld;
    opaque(l);
    *(layout *)*l = (layout){t, r, c, 1};
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void *v, size_t n)
{
    if (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT && n >= sizeof(int32_t)) ((layout *)l)->count = *(const int32_t *)v;
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return drop(l); }
API cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) { return opaque(p); }
API cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return drop(p); }

API cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t op, cublasLtMatrixLayout_t a,
                                                  cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                  cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t pref, int want,
                                                  cublasLtMatmulHeuristicResult_t *out, int *got)
{
    (void)h; (void)op; (void)a; (void)b; (void)c; (void)d; (void)pref;
    *got = want > 0;
    if (want > 0) {
        memset(out, 0, sizeof *out);
        out->state = CUBLAS_STATUS_SUCCESS;
        out->wavesCount = 1.0f;
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* The signatures are the library's: most of what they take matters to a real card alone. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

/* m, n, k, how many, cudaDataType of the inputs, cublasComputeType (-1: as the inputs) */
static cublasStatus_t product(cudaStream_t s, uint64_t m, uint64_t n, uint64_t k, int count, int type, int compute)
{
    journal("gemm", s, "%llu\t%llu\t%llu\t%d\t%d\t%d", (unsigned long long)m, (unsigned long long)n, (unsigned long long)k, count, type, compute);
    return CUBLAS_STATUS_SUCCESS;
}
static cudaStream_t stream_used(cublasHandle_t h) { return ((cudaStream_t *)h)[1]; }

API cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s)
{
    ((cudaStream_t *)h)[1] = s; /* behind the two modes */
    return CUBLAS_STATUS_SUCCESS;
}
API cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t op, const void *alpha, const void *A, cublasLtMatrixLayout_t a,
                                  const void *B, cublasLtMatrixLayout_t b, const void *beta, const void *C, cublasLtMatrixLayout_t c, void *D,
                                  cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo, void *w, size_t ws, cudaStream_t s)
{
    const layout *in = (const layout *)a, *result = (const layout *)d;
    uint64_t m = result->rows ? result->rows : 1;
    return product(s, result->rows, result->columns, in->rows * in->columns / m, result->count, in->type, -1);
}
API cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha, const void *A,
                                cudaDataType at, int lda, const void *B, cudaDataType bt, int ldb, const void *beta, void *C, cudaDataType ct,
                                int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
    return product(stream_used(h), m, n, k, 1, at, compute);
}
API cublasStatus_t cublasSgemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha, const void *A,
                                 cudaDataType at, int lda, const void *B, cudaDataType bt, int ldb, const float *beta, void *C, cudaDataType ct, int ldc)
{
    return product(stream_used(h), m, n, k, 1, at, -1);
}
API cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *alpha,
                                              const void *A, cudaDataType at, int lda, long long sa, const void *B, cudaDataType bt, int ldb,
                                              long long sb, const void *beta, void *C, cudaDataType ct, int ldc, long long sc, int count,
                                              cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
    return product(stream_used(h), m, n, k, count, at, compute);
}
API cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha, const float *A,
                                  int lda, const float *B, int ldb, const float *beta, float *C, int ldc)
{
    return product(stream_used(h), m, n, k, 1, CUDA_R_32F, -1);
}
API cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *alpha,
                                             const float *A, int lda, long long sa, const float *B, int ldb, long long sb, const float *beta,
                                             float *C, int ldc, long long sc, int count)
{
    return product(stream_used(h), m, n, k, count, CUDA_R_32F, -1);
}
