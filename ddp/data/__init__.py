"""Data sets: `prepare` once in the parent, `load` in every worker; `splits` says what they hand over."""
