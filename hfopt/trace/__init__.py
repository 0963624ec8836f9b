"""One training step on fake tensors: every allocation, free and kernel, recorded in order."""
