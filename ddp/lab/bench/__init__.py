"""Measures collectives and training steps and torch's own, in the same run, for `scripts/ddp bench …`."""
