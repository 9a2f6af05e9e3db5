"""Data sets, the orders in which they are read, the samplers that share them out, and the loaders that fetch them.

Names here are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp.data.cache import OnInput as OnInput
    from ddp.data.cache import Transformed as Transformed
    from ddp.data.decoders import ImageAndClass as ImageAndClass
    from ddp.data.files import FileSet as FileSet
    from ddp.data.lines import Csv as Csv
    from ddp.data.lines import JsonLines as JsonLines
    from ddp.data.orders import Blocks as Blocks
    from ddp.data.orders import FirstOf as FirstOf
    from ddp.data.orders import Fixed as Fixed
    from ddp.data.orders import Order as Order
    from ddp.data.orders import Permutation as Permutation
    from ddp.data.orders import Stratified as Stratified
    from ddp.data.orders import Weighted as Weighted
    from ddp.data.remote import Retries as Retries
    from ddp.data.storage import Storage as Storage
    from ddp.data.tar_shards import TarSamples as TarSamples
    from ddp.data.token_budget import TokenBudget as TokenBudget
    from ddp.data.tokens import TokenSet as TokenSet
    from ddp.errors import UnreadableSample as UnreadableSample

_HOMES = {
    "Blocks": "ddp.data.orders",
    "Csv": "ddp.data.lines",
    "FileSet": "ddp.data.files",
    "FirstOf": "ddp.data.orders",
    "Fixed": "ddp.data.orders",
    "ImageAndClass": "ddp.data.decoders",
    "JsonLines": "ddp.data.lines",
    "OnInput": "ddp.data.cache",
    "Order": "ddp.data.orders",
    "Permutation": "ddp.data.orders",
    "Retries": "ddp.data.remote",
    "Storage": "ddp.data.storage",
    "Stratified": "ddp.data.orders",
    "TarSamples": "ddp.data.tar_shards",
    "TokenBudget": "ddp.data.token_budget",
    "TokenSet": "ddp.data.tokens",
    "Transformed": "ddp.data.cache",
    "UnreadableSample": "ddp.errors",
    "Weighted": "ddp.data.orders",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddp.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
