"""The communicator: runs collectives (schedules as data) over a transport or in shared memory, each with a deadline.

Read `execute.py` (one schedule over one buffer) and `host_reduce.py` with `host_memory.py` (a collective in the memory
of one host), then `carrier.py`, which joins them, and `communicator.py` (the user's verbs), `flat.py`, `call.py`.
Which way is fastest: `calibrate.py` measures, `select.py` predicts and chooses. Beside them `work.py` (a collective in
flight), `watchdog.py` (who is missing), `objects.py` and `setup.py` (`ddp.init`).
"""
