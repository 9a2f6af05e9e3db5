"""Replicas: equal copies of a model, kept equal.

Read `naive.py` (what data parallelism is), then `backward.py` and `bucketed.py` (how it overlaps with backward: all of
DDP). Everything else that torch's class offers is in `drop_in/`.
"""
