"""Learning-rate schedules."""

from ddp.optim.schedules import constant as constant
from ddp.optim.schedules import cosine as cosine
from ddp.optim.schedules import step as step
from ddp.optim.schedules import with_warmup as with_warmup
