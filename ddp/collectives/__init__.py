"""Collectives as data: schedules that say who sends which chunk to whom, in which round. No torch here.

`schedule.py` has the vocabulary and the checker. The algorithms follow, the simplest first. `catalog.py` lists all of
them by name, `draw.py` prints them, `simulate.py` runs them on a logical clock, `cost.py` predicts their time, and
`ddp/comm/execute.py` runs them on tensors.
"""
