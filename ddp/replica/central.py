"""The replica of central storage: each bucket is added up in slices, and every host gets all of them.

Where a host has several ranks, each rank gets the mean gradient of the slice that its place on the host stands for:
the same on every host. `strategies/central_storage.py` updates it, in memory that the ranks of the host share.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ddp.comm.communicator import Communicator
from ddp.gradients.bucket import Bucket
from ddp.gradients.reducer import AllReduce, Reducer
from ddp.replica.sharded import ReduceScatter, ShardedDataParallel, bounds_of, slice_bounds
from ddp.rules import Setup, refuse


class CentralDataParallel(ShardedDataParallel):
    """Gives each rank the mean gradient of a slice, which ranks in the same place on other hosts have, too.

    Args:
        module: as in `ShardedDataParallel`; on the CPU.

    Raises:
        ConfigError: the ranks of a host cannot share memory, or gradients are on a GPU.
    """

    def __init__(self, module: nn.Module, **how: Any) -> None:
        super().__init__(module, **how)
        check_memory(self.comm)

    def slice_of(self, bucket: Bucket) -> tuple[int, int]:
        hosts, place = self.comm.host_partition, self.comm.host_partition.places[self.comm.rank]
        if are_alike(self.comm):
            bounds = bounds_of(bucket, self.comm)[:: hosts.num_hosts]
        else:  # those that have no counterpart on the smallest host have no slice
            bounds = slice_bounds(bucket, hosts.num_places)
            bounds += [bounds[-1]] * (max(hosts.places) + 2 - len(bounds))
        return bounds[place], bounds[place + 1]

    def _plain_reducer(self) -> Reducer:
        if are_alike(self.comm) and self.wire is None:
            return ReduceScatterOnHosts(self.comm, None, self.num_shards)
        return AllReduce(self.comm, self.wire, self.num_shards)


class ReduceScatterOnHosts(ReduceScatter):
    """Gives every rank the mean of its slice, and of those of its counterparts."""

    on_hosts = True


def are_alike(comm: Communicator) -> bool:
    """Returns True if all hosts have equally many ranks."""
    return len({len(host) for host in comm.hosts}) == 1


def check_memory(comm: Communicator) -> None:
    """Raises ConfigError unless the ranks of each host share memory, in which their tensors are."""
    shares_memory = comm.host_partition.num_hosts == len(comm.hosts)  # else each rank counts as a host there
    refuse(Setup(strategy="central_storage", device=comm.device.type, shared_memory=shares_memory))
