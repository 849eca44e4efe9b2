"""The cost of a compiled step on a TPU slice: memory, traffic and bounds on speed."""

from typing import Any, NamedTuple

from jax.sharding import Mesh

from txl_jax.aot import roofline
from txl_jax.aot.chips import Slices
from txl_jax.aot.hlo import Program
from txl_jax.aot.lower import Compiled
from txl_jax.aot.traffic import by_scope, collectives, hbm_bytes
from txl_jax.model.config import ModelConfig
from txl_jax.model.flops import needed_flops
from txl_jax.sharding.rules import shards


class Work(NamedTuple):
    """The work of one update, or the evaluation of one segment."""

    model: ModelConfig
    streams: int
    tgt_len: int  # tokens of a segment that are predicted
    ext_len: int  # tokens read before them
    training: bool
    chunks: int = 1  # of the streams
    segments: int = 1  # in one update
    updates: int = 1  # in one call of the step


def estimate(tpus: Slices, mesh: Mesh, done: Compiled, work: Work) -> dict[str, Any]:
    """Returns the memory of a step, and per update its traffic and bounds on speed."""
    capacity = tpus.chip.hbm
    B, L, width = work.streams, work.tgt_len, work.ext_len + work.tgt_len
    needed = needed_flops(work.model, B, width, work.training)
    result: dict[str, Any] = {
        "fits": done.fits,
        "hbm_bytes": done.bytes,
        "hbm_capacity_bytes": int(capacity),
        "seconds_to_compile": round(done.seconds, 1),
        "flops_per_token": needed / (B * L),
    }
    if not done.fits:
        return result | {"exceeds_by_bytes": int(done.bytes - capacity)}

    program, calls = Program(done.text), work.updates
    streams = B / work.chunks / shards(mesh, "B")
    made = roofline.device_flops(
        work.model, streams, width, mesh.shape["model"], work.training
    )
    made *= work.chunks * work.segments
    exchanged = [x._replace(times=x.times / calls) for x in collectives(program)]
    by_path = hbm_bytes(program)
    traffic = sum(by_path.values()) / calls
    places = enumerate(mesh.devices.flat)  # attached GPUs may lack coordinates
    coords = [tuple(getattr(device, "coords", (0, 0, n))) for n, device in places]
    seconds = roofline.bounds(tpus, made, traffic, exchanged, coords)
    # If the greatest of them hides the others, and if none hides another.
    both = {"full_overlap": max(seconds.values()), "no_overlap": sum(seconds.values())}
    tokens, flops = B * L * work.segments, needed * work.segments
    peak = tpus.chips * tpus.chip.flops
    totals: dict[str, dict[str, int]] = {}
    for each in exchanged:
        total = totals.setdefault(each.kind, {"count": 0, "bytes": 0})
        total["count"] += round(each.times)
        total["bytes"] += int(each.times * each.bytes)
    scopes = by_scope(by_path)
    return result | {
        "tokens": tokens,
        "step_seconds": both,
        "tokens_per_second": {name: tokens / s for name, s in both.items()},
        "utilisation": {name: flops / peak / s for name, s in both.items()},
        "limit": max(seconds, key=seconds.__getitem__),
        "seconds": seconds,
        "communication_share": seconds["interconnect"] / both["no_overlap"],
        "cross_slice_share": seconds["network"] / both["no_overlap"],
        "hbm_traffic_bytes": int(traffic),
        "hbm_traffic_by_scope": {name: int(scopes[name] / calls) for name in scopes},
        "collectives": totals,
    }
