"""The communicator: runs collectives (schedules as data) over a transport, with a deadline and a name on every wait.

Read `execute.py` (one schedule over one buffer), then `communicator.py` (the user's verbs), `work.py` (a collective in
flight), `watchdog.py` (who is missing) and `setup.py` (`ddp.init`).
"""
