"""The communicator: runs collectives (schedules as data) over a transport or in shared memory, each with a deadline.

communicator.py, verbs.py, checks.py    the verbs that users call, and what they refuse
call_queue.py, work.py                  one call at a time, in the foreground or in the background
flat_collectives.py, reduction.py       every collective on a flat buffer, by the fastest route
host_memory.py, host_reduce.py          in the memory of one host
host_links.py, execute.py               by a schedule over a transport, or both; in a `wire_format.py` if asked to
plan.py                                 which route an all-reduce takes
messages.py, objects.py, host_share.py  messages, Python objects, memory of a host
opening.py, connect.py, settings.py     how a communicator begins
device.py                               where its tensors are; by NCCL or by Gloo
session.py                              what `ddp.init` remembers
transport/ · meeting/ · watch/          edges between ranks · how ranks find each other · who is missing
"""
