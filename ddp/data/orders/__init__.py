"""Orders and sampling: each step's samples, and each rank's share of them."""
