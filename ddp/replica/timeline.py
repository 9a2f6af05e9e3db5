"""What the last step's reductions took, bucket by bucket: `DistributedDataParallel.logging_data()`.

    ready ── launched ── done      seconds after backward began
    overlap                        share of (launched … done) that lies before backward ended; 0 in the foreground,
                                   where backward stands still meanwhile

"Until my bucket was ready" and "until its mean was there" are told apart: the slowest rank's buckets are ready late,
and all others' are done late.

In a profile every bucket's reduction is a range on the thread that runs it; with overlap that is not the caller's, and
torch's profiler shows it if it is told to:

    torch.profiler.profile(experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))
"""

from __future__ import annotations

from typing import Any

import torch

from ddp.gradients.bucket import Bucket
from ddp.replica.reducer import Reducer


def describe(reducer: Reducer) -> dict[str, Any]:
    """The last step in numbers; plain values, for a log."""
    buckets = [_describe(bucket, reducer) for bucket in reducer.buckets]
    in_flight_s = sum(each["done_s"] - each["launched_s"] for each in buckets)
    hidden_s = sum(each["overlap"] * (each["done_s"] - each["launched_s"]) for each in buckets)
    return {
        "num_steps": reducer.num_steps,
        "world_size": reducer.comm.world_size,
        "num_parameters": len(reducer.slots),
        "order_is_learned": reducer.order is not None,
        "runs": "in the background" if reducer.overlap else "in the foreground",
        "comm_hook": reducer.hook.name if reducer.hook is not None else None,
        "bytes": sum(each["bytes"] for each in buckets),
        "backward_s": reducer.ended_s - reducer.began_s,
        "overlap": hidden_s / in_flight_s if in_flight_s > 0 else 0.0,
        "buckets": buckets,
    }


def _describe(bucket: Bucket, reducer: Reducer) -> dict[str, Any]:
    ready_s, launched_s, done_s = (at - reducer.began_s for at in (bucket.ready_s, bucket.launched_s, bucket.done_s))
    backward_s, in_flight_s = reducer.ended_s - reducer.began_s, done_s - launched_s
    hidden_s = max(0.0, min(done_s, backward_s) - launched_s) if reducer.overlap else 0.0
    return {
        "index": bucket.index,
        "parameters": [slot.name for slot in bucket.slots],
        "numel": sum(slot.parameter.numel() for slot in bucket.slots),
        "bytes": bucket.num_bytes,
        "dtype": str(bucket.slots[0].parameter.dtype if bucket.slots else torch.float32).removeprefix("torch."),
        "ready_s": ready_s,
        "launched_s": launched_s,
        "done_s": done_s,
        "overlap": hidden_s / in_flight_s if in_flight_s > 0 else 0.0,
    }
