"""Memory and time of a training step, predicted from a trace on fake tensors: no weights, no card."""
