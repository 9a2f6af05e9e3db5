"""Finds out about a running job. Nothing here imports the rest of `train/`, which acts on it."""
