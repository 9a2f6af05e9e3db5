"""What is learned from a batch: loss, metrics and outputs, in sums that any number of ranks can add."""
