"""Every keyword of torch's DistributedDataParallel (torch 2.13), and what it means here.

keyword                          here
module, device_ids, output_device, dim
init_sync, process_group, device_mesh
bucket_cap_mb, bucket_cap_mb_list
find_unused_parameters, static_graph
broadcast_buffers, forward_sync_buffers
                                 as in torch
gradient_as_bucket_view          accepted; gradients are views of their buckets either way
batched_grad_copy                accepted; small gradients are always copied together
check_reduction                  accepted; reductions are always checked (torch ignores it, too)
mixed_precision                  refused: the precision setting, or torch.autocast around forward
delay_all_reduce_named_params    refused: `bucket_cap_mb_list`, or parameters ignored by name
param_to_hook_all_reduce         refused: belongs to the one before
skip_all_reduce_unused_params    refused: `static_graph=True` learns which parameters stay unused
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACCEPTED = frozenset({"gradient_as_bucket_view", "batched_grad_copy", "check_reduction"})
USE_INSTEAD = {
    "mixed_precision": "precision=bf16 of ddp.fit, or torch.autocast around forward",
    "delay_all_reduce_named_params": "bucket_cap_mb_list for when buckets are closed, or "
    "module._ddp_params_and_buffers_to_ignore for parameters that you reduce yourself",
    "param_to_hook_all_reduce": "nothing: it belongs to delay_all_reduce_named_params",
    "skip_all_reduce_unused_params": "static_graph=True: the first step shows which parameters stay unused",
}


def check_keywords(others: Mapping[str, Any]) -> None:
    """Raises TypeError for a keyword that is unknown, or that is set and means nothing here; says what to use."""
    for keyword, value in others.items():
        if keyword in ACCEPTED:
            continue
        if keyword not in USE_INSTEAD:
            raise TypeError(f"DistributedDataParallel got an unexpected keyword {keyword!r}")
        if value is not None and value is not False:
            raise TypeError(
                f"DistributedDataParallel does not take {keyword}={value!r}; instead: {USE_INSTEAD[keyword]}"
            )


def bucket_limits(
    bucket_cap_mb: float | None, bucket_cap_mb_list: list[int] | None, first_bucket_mb: float | None
) -> list[int]:
    """Bytes at which bucket 0, 1, 2, … is closed; the last one holds for all that follow.

    Raises:
        ValueError: both kinds of caps are given, or one is not positive.
    """
    if bucket_cap_mb is not None and bucket_cap_mb_list is not None:
        raise ValueError(
            f"bucket_cap_mb={bucket_cap_mb} and bucket_cap_mb_list={bucket_cap_mb_list} exclude each other; give one"
        )
    if bucket_cap_mb_list is not None:
        caps = list(map(float, bucket_cap_mb_list))
    else:
        rest = DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        caps = [min(rest, DEFAULT_FIRST_MB if first_bucket_mb is None else first_bucket_mb), rest]
    if not caps or min(caps) <= 0:
        raise ValueError(f"bucket caps of {caps} MiB: give at least one, and positive ones")
    return [max(1, int(cap * MIB)) for cap in caps]


MIB = 1 << 20
DEFAULT_CAP_MB, DEFAULT_FIRST_MB = 25.0, 1.0
