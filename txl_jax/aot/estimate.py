"""The cost of a compiled step on a TPU slice: memory, traffic and bounds on speed.

Dims: B streams, L segment.
"""

from collections import Counter
from typing import Any, NamedTuple

from jax.sharding import Mesh

from txl_jax import sharding
from txl_jax.aot import roofline
from txl_jax.aot.chips import Slice
from txl_jax.aot.collectives import collectives
from txl_jax.aot.hlo import Program
from txl_jax.aot.lower import Compiled
from txl_jax.aot.traffic import by_scope, hbm_bytes
from txl_jax.model.config import ModelConfig


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


def estimate(tpus: Slice, mesh: Mesh, done: Compiled, work: Work) -> dict[str, Any]:
    """Returns the memory of a step, and per update its traffic and bounds on speed."""
    capacity = tpus.chip.hbm
    B, L, width = work.streams, work.tgt_len, work.ext_len + work.tgt_len
    flops = roofline.update_flops if work.training else roofline.forward_flops
    needed = flops(work.model, B, width)
    result: dict[str, Any] = {
        "fits": done.fits,
        "hbm_bytes": done.bytes,
        "hbm_capacity_bytes": int(capacity),
        "donated_bytes": done.aliased,
        "seconds_to_compile": round(done.seconds, 1),
        "flops_per_token": needed / (B * L),
    }
    if not done.fits:
        return result | {"exceeds_by_bytes": int(done.bytes - capacity)}

    program, calls = Program(done.text), work.updates
    streams = B / work.chunks / sharding.stream_shards(mesh)
    made = work.chunks * roofline.device_flops(
        work.model, streams, width, mesh.shape["model"], work.training
    )
    exchanged = [x._replace(times=x.times / calls) for x in collectives(program)]
    by_path = hbm_bytes(program)
    traffic = sum(by_path.values()) / calls
    coords = [tuple(device.coords) for device in mesh.devices.flat]
    bounds = roofline.bound(tpus, made * work.segments, traffic, exchanged, coords)
    tokens, peak = B * L * work.segments, tpus.chips * tpus.chip.flops
    pair = {"full_overlap": bounds.full_overlap, "no_overlap": bounds.no_overlap}
    sizes, counts = Counter[str](), Counter[str]()
    for each in exchanged:
        sizes[each.kind] += int(each.times * each.bytes)
        counts[each.kind] += round(each.times)
    return result | {
        "tokens": tokens,
        "step_seconds": pair,
        "tokens_per_second": {name: tokens / s for name, s in pair.items()},
        "utilisation": {
            name: needed * work.segments / peak / s for name, s in pair.items()
        },
        "limit": bounds.limit,
        "seconds": bounds._asdict(),
        "communication_share": bounds.interconnect / bounds.no_overlap,
        "hbm_traffic_bytes": int(traffic),
        "hbm_traffic_by_scope": {
            name: int(size / calls) for name, size in by_scope(by_path).items()
        },
        "collectives": {
            kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in sizes
        },
    }
