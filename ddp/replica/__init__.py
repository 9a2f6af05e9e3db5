"""Replicas: equal copies of a model, kept equal.

Read `broadcast.py` (equal at the start), `replica.py` (the module around a model) and `naive.py` (one all-reduce per
parameter: the whole idea); then `reducer.py` (the same in buckets, overlapped with backward) and `data_parallel.py`
(all that torch's class has). `verify.py` proves it.
"""
