"""The checkpoints of a run: their content, their files, and older names in them."""
