"""An edge between two ranks, over which messages travel; or memory that both share. No module here knows collectives.

`edge.py` is the contract of an edge; `gloo.py` and `nccl.py` have those of Gloo and NCCL. `shared_memory.py` is memory,
semaphores and a barrier between processes of one host; `topology.py` finds out which ranks those are.
"""
