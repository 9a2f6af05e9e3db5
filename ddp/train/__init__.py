"""The training loop, evaluation, checkpoints, and the callbacks that watch a run."""
