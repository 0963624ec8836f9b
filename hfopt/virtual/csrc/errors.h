/* The runtime's sticky last error. */
#pragma once
#include <cuda_runtime_api.h>

cudaError_t fail(cudaError_t e);
