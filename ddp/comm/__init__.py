"""The communicator: runs collectives (schedules as data) over a transport or in shared memory, each with a deadline.

communicator.py, verbs.py, checks.py    the verbs and messages that users call, and checks of their arguments
call_queue.py                           runs one call at a time, in the foreground or in the background
nccl.py                                 the same on GPUs, where collectives are enqueued
flat_collectives.py, reduction.py       every collective on a flat buffer, by the fastest route; wire formats
host_memory.py, host_reduce.py          collectives in the memory of one host
host_links.py, execute.py               collectives by a schedule over a transport, or both
plan.py                                 chooses the route of an all-reduce
objects.py                              sends Python objects, as plain values and tensors
opening.py, connect.py                  opens a communicator: devices, backends, which ranks share a host
session.py                              the state of `ddp.init`
transport/ · meeting/ · watch/          edges between ranks · rendezvous · finds the rank that is missing
"""
