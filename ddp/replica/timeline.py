"""The times of the last step's reductions, bucket by bucket: `BucketedDataParallel.logging_data()`.

    ready ── launched ── done      seconds after backward began
    overlap                        share of (launched … done) that lies before backward ended; 0 in the foreground,
                                   where backward stands still meanwhile

The slowest rank's buckets are ready late; all other ranks' buckets are ready early, and done late. So the two times
together show who waited for whom.

In a profile, every bucket's reduction is a range on the thread that runs it, and inside of it the way that it takes
("ddp: ring"). With overlap that is a background thread; on the thread of backward the wait for the bucket is a range.
torch's profiler records the background thread only if it is told to:

    torch.profiler.profile(experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True))
"""

from __future__ import annotations

from typing import Any

from ddp.gradients.layout import Layout
from ddp.replica.backward import Backward, BucketReduction


def describe(backward: Backward, num_steps: int, layout: Layout) -> dict[str, Any]:
    """Returns the last step in numbers; plain values, for a log.

    Args:
        num_steps: number of backwards that have synchronised so far.
        layout: that of the next step; after a first backward it has the order that was learned.
    """
    buckets = [_describe(reduction, backward) for reduction in backward.reductions]
    in_flight_s = sum(each["done_s"] - each["launched_s"] for each in buckets)
    hidden_s = sum(each["overlap"] * (each["done_s"] - each["launched_s"]) for each in buckets)
    return {
        "num_steps": num_steps,
        "world_size": backward.comm.world_size,
        "num_parameters": len(layout.slots),
        "order_is_learned": layout.is_learned,
        "runs": "in the background" if backward.overlap else "in the foreground",
        "bytes": sum(each["bytes"] for each in buckets),
        "backward_s": backward.ended_s - backward.began_s,
        "overlap": hidden_s / in_flight_s if in_flight_s > 0 else 0.0,
        "buckets": buckets,
    }


def _describe(reduction: BucketReduction, backward: Backward) -> dict[str, Any]:
    bucket, backward_s = reduction.bucket, backward.ended_s - backward.began_s
    ready_s, launched_s, done_s = (
        at_s - backward.began_s for at_s in (reduction.ready_s, reduction.launched_s, reduction.done_s)
    )
    hidden_s = max(0.0, min(done_s, backward_s) - launched_s) if backward.overlap else 0.0
    return {
        "index": bucket.index,
        "parameters": [slot.name for slot in bucket.slots],
        "numel": sum(slot.parameter.numel() for slot in bucket.slots),
        "bytes": bucket.num_bytes,
        "dtype": str(bucket.slots[0].parameter.dtype).removeprefix("torch."),
        "ready_s": ready_s,
        "launched_s": launched_s,
        "done_s": done_s,
        "overlap": hidden_s / (done_s - launched_s) if done_s > launched_s else 0.0,
    }
