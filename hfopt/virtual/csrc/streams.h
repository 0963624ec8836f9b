/* What a stream and an event remember: which capture they belong to, if any. */
#pragma once
#include <cuda_runtime_api.h>

typedef struct { int priority; unsigned long long capture; } stream;
typedef struct { long long recorded_ns; unsigned long long capture; } event;

stream *stream_of(cudaStream_t s); /* the three default streams are one */
void capture_leave(stream *s);     /* a stream that is destroyed is in no capture */
