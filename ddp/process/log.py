"""One logger for the package: every line says which rank logs it; rank 0 alone reaches the terminal.

`log` is an ordinary `logging.Logger` named "ddp", so applications can redirect it. `follow_rank` sets the prefix, and
tells lightning-utilities' `rank_zero_*` helpers the rank; call it at every change of membership.
"""

from __future__ import annotations

import logging

from lightning_utilities.core.rank_zero import rank_zero_only

log = logging.getLogger("ddp")


class _RankFilter(logging.Filter):
    """Adds `rank` and `world_size` to everything that is logged."""

    rank, world_size = 0, 1

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank, record.world_size = self.rank, self.world_size
        return True


_rank_filter = _RankFilter()
log.addFilter(_rank_filter)


def follow_rank(rank: int, world_size: int) -> None:
    """Makes every later log line carry this rank."""
    _rank_filter.rank, _rank_filter.world_size = rank, world_size
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def add_handler(handler: logging.Handler, level: int = logging.INFO) -> None:
    """Formats `handler` with time and rank and attaches it to the package's logger."""
    handler.setFormatter(logging.Formatter("%(asctime)s rank %(rank)s/%(world_size)s %(levelname)s  %(message)s"))
    handler.setLevel(level)
    log.addHandler(handler)
    log.setLevel(min(level, log.level or level))
