"""What lies between two ranks: an edge that messages take, or memory that both see.

`edge.py` is the contract of an edge, `process_group.py` the real thing (Gloo, NCCL), `simulated.py` ranks as threads,
`faulty.py` a transport that fails on script. `shared_memory.py` is memory, semaphores and a barrier between processes
of one host, `topology.py` finds out which ranks share one. Nothing here knows what a collective is.
"""
