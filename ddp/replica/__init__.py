"""Replicas: equal copies of a model, kept equal.

Read `broadcast.py` (equal at the start), `naive.py` (one all-reduce per parameter: the whole idea), then `reducer.py`
(the same in buckets, overlapped with backward) and `data_parallel.py` (the module around it). `verify.py` proves it.
"""
