"""From a sampler's indices to batches: loader processes, reading ahead, streams of samples."""
