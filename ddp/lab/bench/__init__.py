"""Measures collectives and training steps beside torch's own, in the same run, for `scripts/ddp bench …`."""
