"""Data sets: what each holds, and where it lies."""
