"""An edge between two ranks, over which messages travel; or memory that both share. No module here knows collectives.

`edge.py` is the contract of an edge; `gloo.py` has those of Gloo (`comm/nccl.py` those of NCCL). `shared_memory.py` is
memory, semaphores and a barrier between processes of one host.
"""
