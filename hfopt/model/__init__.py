"""What is trained: a model from its configuration alone, and batches of the right inputs for it."""
