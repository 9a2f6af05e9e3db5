"""Strategies: who holds parameters and optimizer state, and how often the workers agree; for a loop of your own."""

from ddp.strategies.central_storage import CentralStorage as CentralStorage
from ddp.strategies.fully_sharded import FullySharded as FullySharded
from ddp.strategies.local_sgd import LocalSteps as LocalSteps
from ddp.strategies.local_sgd import Streaming as Streaming
from ddp.strategies.sharded import Sharded as Sharded
from ddp.strategies.strategy import Agreement as Agreement
from ddp.strategies.strategy import Replicated as Replicated
from ddp.strategies.strategy import Strategy as Strategy
from ddp.strategies.strategy import step as step
