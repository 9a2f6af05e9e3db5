"""One edge between two ranks: how a round of sends and receives reaches the neighbours.

`edge.py` is the contract, `process_group.py` the real thing (Gloo, NCCL), `simulated.py` ranks as threads,
`faulty.py` a transport that fails on script. Nothing here knows what a collective is.
"""
