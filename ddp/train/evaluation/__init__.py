"""Evaluations: of held-out samples while a run goes on, and by a process of its own."""
