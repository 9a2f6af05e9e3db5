"""Collectives as data: schedules that say who sends which chunk to whom, in which round. No torch here.

`schedule.py` has the vocabulary and the checker. The algorithms are in a module each; `catalog.py` lists them all by
name, `simulate.py` runs them on a logical clock, `cost.py` predicts their time, and `ddp/comm/execute.py` runs them on
tensors.

    from ddp.collectives import Recv, Send, register        # for your own all-reduce
"""

from ddp.collectives.catalog import register as register
from ddp.collectives.schedule import Goal as Goal
from ddp.collectives.schedule import Recv as Recv
from ddp.collectives.schedule import Round as Round
from ddp.collectives.schedule import Schedule as Schedule
from ddp.collectives.schedule import Send as Send
