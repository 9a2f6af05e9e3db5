"""The communicator: runs collectives (schedules as data) over a transport or in shared memory, each with a deadline.

communicator.py, verbs.py, checks.py    the verbs and messages that users call, and what they refuse
call_queue.py                           one call at a time, in the foreground or in the background
nccl.py                                 the same on GPUs: collectives are enqueued there
flat_collectives.py, reduction.py       every collective on a flat buffer, by the fastest route; wire formats
host_memory.py, host_reduce.py          in the memory of one host
host_links.py, execute.py               by a schedule over a transport, or both
plan.py                                 which route an all-reduce takes
objects.py                              Python objects, as plain values and tensors
opening.py, connect.py                  how a communicator begins: devices, backends, which ranks share a host
session.py                              what `ddp.init` remembers
transport/ · meeting/ · watch/          edges between ranks · how ranks find each other · who is missing
"""
