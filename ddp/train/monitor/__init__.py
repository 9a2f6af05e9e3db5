"""Finds out about a run while it goes on. Nothing here imports the rest of `train/`, which acts on it."""
