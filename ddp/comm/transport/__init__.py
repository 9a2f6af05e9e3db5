"""Edges between ranks, over which messages travel, and memory that ranks share. No module here knows collectives.

`edge.py` is the contract of an edge; `gloo.py` implements it with Gloo, `comm/nccl.py` with NCCL. `shared_memory.py`
has memory, semaphores and a barrier between processes of one host.
"""
