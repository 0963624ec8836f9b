"""Time of a training step: the device's speed, each kernel's share, and the dataloader."""
