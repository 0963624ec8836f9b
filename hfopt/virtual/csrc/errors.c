/* The last error of each thread, and the words torch puts into its messages. */
#include "errors.h"

#include "card.h"

static __thread cudaError_t last_error;

cudaError_t fail(cudaError_t e)
{
    last_error = e;
    return e;
}

API cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
API cudaError_t cudaPeekAtLastError(void) { return last_error; }

static const struct { cudaError_t code; const char *name, *words; } known[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};

API const char *cudaGetErrorName(cudaError_t e)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].code == e) return known[i].name;
    return "cudaErrorUnknown";
}
API const char *cudaGetErrorString(cudaError_t e)
{
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].code == e) return known[i].words;
    return "unknown error";
}
