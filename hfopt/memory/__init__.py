"""Memory of a training step: the allocator, the timeline, and the curve over the batch size."""
