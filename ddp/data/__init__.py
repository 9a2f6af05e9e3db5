"""Data sets, the orders in which they are read, the samplers that share them out, and the loaders that fetch them."""

from ddp.data.orders import Blocks as Blocks
from ddp.data.orders import Fixed as Fixed
from ddp.data.orders import Order as Order
from ddp.data.orders import Permutation as Permutation
from ddp.data.orders import Stratified as Stratified
from ddp.data.orders import Weighted as Weighted
from ddp.data.token_budget import TokenBudget as TokenBudget
from ddp.errors import UnreadableSample as UnreadableSample
