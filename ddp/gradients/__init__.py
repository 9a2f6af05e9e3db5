"""Gradients at rest: the buckets that they live in (`bucket.py`), and what a step must agree on (`totals.py`)."""
