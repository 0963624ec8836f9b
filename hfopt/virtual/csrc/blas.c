/*
 * cuBLAS and cuBLASLt calls that must hand something back. All the others (the
 * multiplications themselves) are generated stubs that return success.
 */
#include <stdlib.h>
#include <string.h>

#include "nohalf.h"
#include <cublasLt.h>
#include <cublas_v2.h>

#include "card.h"


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
    (void)t; (void)r; (void)c; (void)ld;
    return opaque(l);
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
