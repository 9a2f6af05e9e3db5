"""From a sampler's indices to batches: loader processes, caches, streams of samples."""
