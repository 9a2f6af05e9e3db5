"""The communicator: runs collectives (schedules as data) over a transport or in shared memory, each with a deadline.

Read upwards: `arithmetic.py`; `work.py`, `call.py`, `watchdog.py`, `turn.py` (one call at a time, and who is to blame);
`execute.py`, `way.py`, `wire.py` (a schedule over a transport); `host_memory.py`, `host_reduce.py` (a collective in the
memory of one host); `across.py`, `links.py` (both together); `calibrate.py`, `select.py` (which way is fastest);
`flat.py`, `communicator.py` (the user's verbs); `rendezvous.py`, `setup.py` (`ddp.init`), `objects.py`.
"""
