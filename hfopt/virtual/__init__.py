"""The virtual GPU: a stand-in CUDA runtime with no-op kernels and a real memory limit, so PyTorch's own CUDA code runs with no card."""
