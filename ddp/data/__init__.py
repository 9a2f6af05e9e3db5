"""Data sets, the orders in which they are read, the samplers that share them out, and the loaders that fetch them."""

from ddp.data.files.file_set import FileSet as FileSet
from ddp.data.files.lines import Csv as Csv
from ddp.data.files.lines import JsonLines as JsonLines
from ddp.data.files.readers import Retries as Retries
from ddp.data.files.storage import Storage as Storage
from ddp.data.files.tar_files import ImageAndClass as ImageAndClass
from ddp.data.files.tar_files import TarSamples as TarSamples
from ddp.data.orders.order import Blocks as Blocks
from ddp.data.orders.order import FirstOf as FirstOf
from ddp.data.orders.order import Fixed as Fixed
from ddp.data.orders.order import Order as Order
from ddp.data.orders.order import Permutation as Permutation
from ddp.data.orders.order import Stratified as Stratified
from ddp.data.orders.order import Weighted as Weighted
from ddp.data.orders.token_budget import TokenBudget as TokenBudget
from ddp.data.samples import OnInput as OnInput
from ddp.data.samples import Transformed as Transformed
from ddp.data.sets.tokens import TokenSet as TokenSet
from ddp.errors import UnreadableSample as UnreadableSample
