"""Collectives as data: schedules that say who sends which chunk to whom, in which round. No torch here.

Read `schedule.py` first, then `ring.py` and `tree.py`; `draw.py` prints them. `ddp/comm/execute.py` runs them.
"""
