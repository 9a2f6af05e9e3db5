"""One way to read a file, wherever it lies, and a check that it is the version that is meant.

    address                          without cache_dir         with cache_dir
    /data/a.tar, file:///data/a.tar  LocalReader               LocalReader
    s3://bucket/a.tar                RemoteReader: streamed    LocalReader of a copy, downloaded once per host
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ddp.data.files.local_copies import local_copy
from ddp.data.files.readers import Facts, LocalReader, Reader, check_unchanged, local_facts
from ddp.data.files.remote import RemoteReader, Retries, is_remote, remote_facts
from ddp.errors import ConfigError

_NUM_THREADS = 16  # they wait for answers


class Storage(NamedTuple):
    """Reads local and remote files."""

    retries: Retries = Retries()  # of remote calls
    cache_dir: str | Path | None = None  # where remote files are copied to; None streams them

    def facts(self, addresses: Sequence[str]) -> list[Facts]:
        """Returns size and version of each file.

        Raises:
            ConfigError: one of them is missing.
        """
        if not any(map(is_remote, addresses)):
            return list(map(local_facts, addresses))
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return list(threads.map(self._facts, addresses))

    def reader(self, address: str, facts: Facts) -> Reader:
        """Opens a file.

        Raises:
            ConfigError: it is missing, or another version than `facts` say.
        """
        if is_remote(address) and self.cache_dir is not None:
            return self._copy(address, facts, Path(self.cache_dir))
        reader: Reader
        reader = RemoteReader(address, retries=self.retries) if is_remote(address) else LocalReader(address)
        check_unchanged(address, facts, reader.facts)
        return reader

    def _facts(self, address: str) -> Facts:
        return remote_facts(address, retries=self.retries) if is_remote(address) else local_facts(address)

    def _copy(self, address: str, facts: Facts, cache_dir: Path) -> Reader:
        copy = local_copy(address, facts, cache_dir=cache_dir, retries=self.retries)
        size = copy.stat().st_size
        if size != facts.size:
            raise ConfigError(f"{copy} has {size} bytes, and {address} has {facts.size}: delete the copy")
        return LocalReader(str(copy), address=address, facts=facts)


DIRECT = Storage()
"""Streams remote files."""
