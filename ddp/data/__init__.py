"""Data sets, the orders in which they are read, the samplers that share them out, and the loaders that fetch them.

Names here are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.data.files.file_set import FileSet as FileSet
    from ddp.data.files.readers import Retries as Retries
    from ddp.data.files.rows import Arrow as Arrow
    from ddp.data.files.rows import Csv as Csv
    from ddp.data.files.rows import JsonLines as JsonLines
    from ddp.data.files.rows import Parquet as Parquet
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
    from ddp.data.sets.text_sets import TokenSet as TokenSet
    from ddp.errors import UnreadableSample as UnreadableSample

_NAMES = {  # module → what a user finds in ddp.data
    "ddp.data.files.file_set": "FileSet",
    "ddp.data.files.readers": "Retries",
    "ddp.data.files.rows": "Arrow Csv JsonLines Parquet",
    "ddp.data.files.storage": "Storage",
    "ddp.data.files.tar_files": "ImageAndClass TarSamples",
    "ddp.data.orders.order": "Blocks FirstOf Fixed Order Permutation Stratified Weighted",
    "ddp.data.orders.token_budget": "TokenBudget",
    "ddp.data.samples": "OnInput Transformed",
    "ddp.data.sets.text_sets": "TokenSet",
    "ddp.errors": "UnreadableSample",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ddp.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
