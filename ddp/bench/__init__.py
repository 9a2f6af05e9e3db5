"""Measurements against torch's own classes, in the same run; `scripts/bench_*` are their command lines."""
