"""Measurements of a run. Monitors hold numbers; the training loop acts on them."""
