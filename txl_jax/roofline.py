"""How long a step takes at least: products, memory and interconnect of a TPU.

Each of the three is a time: what the step computes or moves, over what the chip does in
a second. Between two bounds lies what a real step can reach: the greatest of the three,
if all of them overlap, and their sum, if none do. Work of the vector units (softmax,
dropout, norms) is in neither.

Dims: L segment, M memory, K = M + L keys, R distances, D model, E embedding, H heads, A
head, F feed-forward, V vocabulary, T tokens.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from txl_jax.chips import Slice
from txl_jax.hlo import Collective
from txl_jax.model.config import ModelConfig


class Products(NamedTuple):
    """FLOPs of matrix products in one pass forward; a multiplication and a sum are 2.

    How often each is made in training: once forward, and backward once for each factor
    that has a gradient.
    """

    both: float = 0  # factors with gradients: 3 times
    one: float = 0  # one factor with a gradient: 2 times; the other is data
    again: float = 0  # as `both`, made once more backward since nothing was kept

    @property
    def forward(self) -> float:
        """FLOPs of evaluation."""
        return self.both + self.one + self.again

    @property
    def training(self) -> float:
        """FLOPs that an update needs, with nothing made twice."""
        return 3 * self.both + 2 * self.one + 3 * self.again

    def made(self, remat: bool) -> float:
        """FLOPs that an update makes; remat makes layers' products once more."""
        layers = (self.both + self.one) if remat else 0
        return self.training + self.again + layers

    def __add__(self, other: tuple[Any, ...]) -> "Products":
        return Products(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> "Products":
        """Returns the products of `count` such passes."""
        return Products(*(count * each for each in self))


def zipf(V: int, cutoffs: tuple[int, ...]) -> list[float]:
    """Returns the part of all tokens in each cluster, by Zipf's law: p ~ 1 / rank.

    Ids are ranks, the commonest first, so a cluster's part is a sum of reciprocals,
    here the difference of two logarithms.
    """
    ends = [0.5, *(cutoff + 0.5 for cutoff in cutoffs), V + 0.5]
    whole = math.log(ends[-1] / ends[0])
    return [
        math.log(high / low) / whole for low, high in zip(ends, ends[1:], strict=False)
    ]


def layer_products(config: ModelConfig, L: int, cached: bool = False) -> Products:
    """Returns the products of all layers for one stream's segment of L tokens.

    Every score of a query and a key counts, hidden ones too: the einsum kernel makes
    them. cached: keys and values of the memory are kept, not made again.
    """
    D, HA, F = config.d_model, config.n_head * config.d_head, config.d_inner
    M = config.mem_len
    K = M + L
    projected = 2 * D * HA * 4 * L  # q, k, v and the output
    scores = 2 * HA * L * K * 2  # by content, and the sum of values
    if config.position == "transformer_xl":
        scores += 2 * HA * L * distances(config, K)
    elif config.position.startswith("shaw"):
        scores += 2 * HA * L * min(K, config.n_position, distances(config, K))
    both = projected + scores + 4 * L * D * F
    memory = 0 if cached else 2 * D * HA * 2 * M
    return Products(both=both, one=memory).times(config.n_layer)


def distances(config: ModelConfig, K: int) -> int:
    """Returns R, how many distances have rows."""
    return min(K, config.clamp_len + 1) if config.clamp_len else K


def shared_products(config: ModelConfig, L: int) -> Products:
    """Returns what a device makes once for all its streams: r = W R of all layers."""
    if config.position != "transformer_xl":
        return Products()
    HA, R = config.n_head * config.d_head, distances(config, config.mem_len + L)
    return Products(one=2.0 * R * config.d_model * HA).times(config.n_layer)


def vocabulary_products(config: ModelConfig, T: float) -> Products:
    """Returns the products of embedding and softmax for T tokens.

    All tokens' embeddings are projected with each cluster's projection, and chosen
    among. In the softmax a cluster's rows meet its own tokens, as many as `zipf` says.
    """
    D, V, cutoffs = config.d_model, config.vocab_size, config.cutoffs
    ends = (0, *cutoffs, V)
    sizes = config.embed_sizes
    same = config.div_val == 1 or not config.proj_same_dim
    projected = [0 if E == D and same else 2.0 * T * D * E for E in sizes]
    # Without div_val one projection serves all clusters.
    each = projected[0] if config.div_val == 1 else sum(projected)
    scored = 2.0 * T * sizes[0] * (ends[1] + len(cutoffs))
    parts = zipf(V, cutoffs)
    for i in range(1, len(sizes)):
        scored += 2.0 * T * parts[i] * sizes[i] * (ends[i + 1] - ends[i])
    return Products(both=2 * each, again=scored)


def update_flops(config: ModelConfig, B: int, L: int) -> float:
    """Returns the FLOPs that one segment of B streams needs, in an update.

    What the mathematics needs: nothing twice, and r once for all streams.
    """
    return (
        layer_products(config, L).times(B)
        + shared_products(config, L)
        + vocabulary_products(config, B * L)
    ).training


def forward_flops(config: ModelConfig, B: int, L: int) -> float:
    """Returns the FLOPs that evaluation needs for one segment of B streams.

    The memory's keys and values are kept from segment to segment, and so is r.
    """
    layers = layer_products(config, L, cached=True).times(B)
    return (layers + vocabulary_products(config, B * L)).forward


def device_flops(
    config: ModelConfig, B: float, L: int, model_shards: int, training: bool = True
) -> float:
    """Returns the FLOPs that a device makes for a segment of its own B streams.

    Layers are divided over the shards of heads and features; the vocabulary is not,
    since every device scores its own streams' tokens with all of it.
    """
    layers = layer_products(config, L, cached=not training).times(B)
    vocabulary = vocabulary_products(config, B * L)
    if not training:  # which keeps r
        return layers.forward / model_shards + vocabulary.forward
    layers += shared_products(config, L)
    return layers.made(config.remat) / model_shards + vocabulary.made(False)


# A hop takes about a microsecond (same book as `chips`, scaling-book/sharding, "A note
# on ICI latency").
HOP = 1e-6


def exchange_seconds(
    part: Slice, collective: Collective, coords: Sequence[tuple[int, ...]]
) -> float:
    """Returns the time of one collective, once; coords are the devices' chips.

    From the same book, scaling-book/sharding: a gather or scatter of V bytes over n
    devices passes V (n - 1) / n bytes of them through each chip, along as many axes at
    once as the devices differ in; adding up is a scatter and a gather; an exchange of
    all with all is a quarter of a gather of what all have together. In a ring of n the
    farthest is n / 2 hops away, in a line n.
    """
    chips = [coords[place] for place in collective.group]
    axes = [a for a in range(len(part.shape)) if len({chip[a] for chip in chips}) > 1]
    n = len(set(chips))
    if not axes:  # the cores of a chip, or nobody
        return 0.0
    if collective.kind == "collective-permute":
        return HOP + collective.bytes / part.chip.link
    lengths = [len({chip[a] for chip in chips}) for a in axes]
    width = sum(part.bandwidth(a) for a in axes)
    hops = sum(
        length / 2 if part.bandwidth(a) > part.chip.link else length
        for a, length in zip(axes, lengths, strict=True)
    )
    if collective.kind == "all-to-all":
        return max(hops * HOP, collective.bytes * n / (4 * width))
    through = max(hops * HOP, collective.bytes * (n - 1) / n / width)
    return 2 * through if collective.kind == "all-reduce" else through


class Bounds(NamedTuple):
    """The three times of a step, in seconds."""

    compute: float
    hbm: float
    interconnect: float

    @property
    def full_overlap(self) -> float:
        """The least: the slowest of the three hides the others."""
        return max(self)

    @property
    def no_overlap(self) -> float:
        """Their sum."""
        return sum(self)

    @property
    def limit(self) -> str:
        """The slowest of the three."""
        return max(self._fields, key=lambda name: getattr(self, name))


def bound(
    part: Slice,
    flops: float,
    hbm_bytes: float,
    collectives: Iterable[Collective],
    coords: Sequence[tuple[int, ...]],
) -> Bounds:
    """Returns the times of what one device makes, reads and writes, and exchanges.

    On v3 a device is a core, with half of the chip's products and memory bandwidth.
    """
    chip, cores = part.chip, part.devices_per_chip
    return Bounds(
        compute=flops * cores / chip.flops,
        hbm=hbm_bytes * cores / chip.hbm_bandwidth,
        interconnect=sum(
            each.times * exchange_seconds(part, each, coords) for each in collectives
        ),
    )
