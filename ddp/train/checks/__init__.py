"""Checks of batches and steps, and the recovery from a bad step."""
