"""Tasks: loss, metrics and outputs of a batch, as sums that any number of ranks can add."""
