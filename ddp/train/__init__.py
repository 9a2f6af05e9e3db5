"""The training loop, evaluation, checkpoints, and the supervision of a run."""
