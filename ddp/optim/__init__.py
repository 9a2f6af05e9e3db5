"""Optimizers for large batches, and learning-rate schedules."""

from ddp.optim.groups import parameter_groups as parameter_groups
from ddp.optim.lamb import LAMB as LAMB
from ddp.optim.lars import LARC as LARC
from ddp.optim.lars import LARS as LARS
from ddp.optim.schedules import TorchSchedule as TorchSchedule
from ddp.optim.schedules import constant as constant
from ddp.optim.schedules import cosine as cosine
from ddp.optim.schedules import polynomial as polynomial
from ddp.optim.schedules import scaled_rate as scaled_rate
from ddp.optim.schedules import step as step
from ddp.optim.schedules import with_warmup as with_warmup
from ddp.optim.schedules import wsd as wsd
