"""The bucketed replica with the whole contract of torch's DistributedDataParallel."""
