"""Evaluations: of held-out samples during a run, and by a separate process."""
