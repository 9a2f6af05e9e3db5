"""Names for users, as `from ddp.drop_in import take_over`."""

from ddp.replica.drop_in.replacement import take_over as take_over
