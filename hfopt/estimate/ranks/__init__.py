"""One rank of several: what a data-parallel rank allocates under DistributedDataParallel, FSDP2 and ZeRO."""
