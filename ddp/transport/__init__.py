"""What lies between two ranks: an edge that messages take, or memory that both see.

`edge.py` is the contract of an edge, `simulated.py` ranks as threads, `process_group.py` the real thing (Gloo, NCCL).
`shared_memory.py` is memory, semaphores and a barrier between processes of one host, `topology.py` finds out which
ranks share one. Nothing here knows what a collective is.
"""
