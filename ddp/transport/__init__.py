"""One edge between two ranks, which messages take; or memory that both see. No module here knows what a collective is.

`edge.py` is the contract of an edge, `simulated.py` ranks as threads, `process_group.py` the real thing (Gloo, NCCL).
`shared_memory.py` is memory, semaphores and a barrier between processes of one host; `topology.py` finds out which
ranks share a host.
"""
