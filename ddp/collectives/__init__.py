"""Collectives as data: schedules that say who sends which chunk to whom, in which round. No torch here.

Read `schedule.py` first: the vocabulary, and the checker. Then the algorithms, simplest first: `master_worker.py`,
`round_robin.py`, `all_to_all.py`; `ring.py`, `tree.py`, `double_tree.py`; `butterfly.py`, `circulant.py`; and with
`placed.py`, schedules inside schedules, `hierarchical.py` and `grid.py`. `catalog.py` has them all by name, `draw.py`
prints and paints them, `cost.py` prices them, `simulate.py` runs them on a logical clock, and `ddp/comm/execute.py`
for good.
"""
