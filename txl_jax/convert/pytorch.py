"""State dicts of the paper's PyTorch code: names, shapes and the order of clusters.

Other code bases differ in names and transpositions: their converters rename the arrays
and call this one.

Dims: N layers, D model, H heads, A head, F feed-forward, V vocabulary, E embedding,
G clusters, P learned distances.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from txl_jax.convert.embedding import Params, read_embedding
from txl_jax.convert.keys import Keys
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

# The arrays of a layer, after "layers.0.". Kernels are [out, in].
LAYER = {
    "attention.qkv": "dec_attn.qkv_net.weight",
    "attention.r": "dec_attn.r_net.weight",
    "attention.o": "dec_attn.o_net.weight",
    "attention.norm.scale": "dec_attn.layer_norm.weight",
    "attention.norm.bias": "dec_attn.layer_norm.bias",
    "feed_forward.in.kernel": "pos_ff.CoreNet.0.weight",
    "feed_forward.in.bias": "pos_ff.CoreNet.0.bias",
    "feed_forward.out.kernel": "pos_ff.CoreNet.3.weight",
    "feed_forward.out.bias": "pos_ff.CoreNet.3.bias",
    "feed_forward.norm.scale": "pos_ff.layer_norm.weight",
    "feed_forward.norm.bias": "pos_ff.layer_norm.bias",
}
TRANSPOSED = (".o", ".kernel")  # here [in, out]


def from_state_dict(
    state: Mapping[str, np.ndarray],
    *,
    mem_len: int,
    cutoffs: Sequence[int] = (),
    clamp_len: int = 0,
    same_length: bool = False,
    pre_lnorm: bool = False,
) -> tuple[ModelConfig, Params]:
    """Returns the model of a state dict, and its parameters.

    Sizes are inferred from the shapes. Tables and projections are tied where they are
    equal bit for bit or exist once. r_w_bias and r_r_bias are untied if they are
    [N, H, A]. Raises UserError for a key that is missing, unknown or of a wrong shape,
    and for cutoffs that do not fit the tables.
    """
    return from_keys(
        Keys(state),
        cutoffs,
        models.pytorch,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
        pre_lnorm=pre_lnorm,
    )


def from_keys(
    keys: Keys,
    cutoffs: Sequence[int],
    family: Callable[..., ModelConfig],
    **fields: Any,
) -> tuple[ModelConfig, Params]:
    """Returns the model family(**fields, **sizes), and its parameters."""
    if "layers.0.dec_attn.q_net.weight" in keys:
        raise UserError(
            "the state dict has attn_type 2 or 3, absolute positions: only 0 and 1, "
            "relative positions, are supported"
        )
    sizes, embedding = read_embedding(keys, tuple(cutoffs))
    heads, relative, attention = _positions(keys)
    F, D = keys.shape("layers.0.pos_ff.CoreNet.0.weight", "F", "D")
    config = family(
        **sizes,
        **heads,
        **fields,
        n_layer=keys.count("layers.{}.pos_ff.CoreNet.0.weight"),
        d_model=D,
        d_inner=F,
    )
    layers = _read_layers(config, keys)
    layers["attention"] |= attention
    keys.close()
    params = {"embedding": embedding, "layers": layers, **relative}
    return config, params


def from_fields(
    state: Mapping[str, np.ndarray],
    fields: Mapping[str, Any],
    family: Callable[..., ModelConfig],
) -> tuple[ModelConfig, Params]:
    """Returns the model of a state dict and the fields of another code's config.

    Raises KeyError, TypeError or OverflowError for fields that are missing or wrong.
    """
    lengths = typed(fields, int, "mem_len", "clamp_len")
    return from_keys(
        Keys(state),
        typed_list(fields, int, "cutoffs"),
        family,
        **{name: max(length, 0) for name, length in lengths.items()},
        **typed(fields, bool, "same_length", "pre_lnorm"),
        **typed(fields, float, "dropout", "dropatt"),
    )


def typed(fields: Mapping[str, Any], kind: type, *names: str) -> dict[str, Any]:
    """Returns the fields; raises TypeError for one of another type."""
    for name in names:
        if type(value := fields[name]) not in (kind, int if kind is float else kind):
            raise TypeError(f"{name} = {value!r} is not of type {kind.__name__}")
    return {name: kind(fields[name]) for name in names}


def typed_list(fields: Mapping[str, Any], kind: type, name: str) -> list[Any]:
    """Returns the field; raises TypeError unless it is a list of the type."""
    values = fields[name]
    if type(values) not in (list, tuple) or any(type(x) is not kind for x in values):
        raise TypeError(f"{name} = {values!r} is not a list of {kind.__name__}s")
    return list(values)


def _positions(keys: Keys) -> tuple[dict[str, Any], Params, Params]:
    """Returns the sizes that u implies, then u and w, then learned distances."""
    heads: dict[str, Any]
    if "r_emb" not in keys:
        untied = keys.rank("r_w_bias") == 3
        shape = keys.shape("r_w_bias", *("NHA" if untied else "HA"))
        heads = {"n_head": shape[-2], "d_head": shape[-1], "untie_r": untied}
        u, w = (keys.take(name, *shape) for name in ("r_w_bias", "r_r_bias"))
        return heads, {"u": u, "w": w}, {}
    N, P, H, A = keys.shape("r_emb", *"NPHA")
    heads = {"n_head": H, "d_head": A, "position": "shaw_biased", "n_position": P}
    distances = {
        "distances": keys.take("r_emb", N, P, H, A),
        "distance_bias": keys.take("r_bias", N, P, H),
    }
    return heads, {"u": keys.take("r_w_bias", N, H, A)}, distances


def _read_layers(config: ModelConfig, keys: Keys) -> Params:
    """Returns the stacked parameters of all layers."""
    N, D, F = config.n_layer, config.d_model, config.d_inner
    H, A = config.n_head, config.d_head
    shapes = {
        **dict.fromkeys(LAYER, (D,)),
        "attention.qkv": (3 * H * A, D),
        "attention.r": (H * A, D),
        "attention.o": (D, H * A),
        "feed_forward.in.kernel": (F, D),
        "feed_forward.in.bias": (F,),
        "feed_forward.out.kernel": (D, F),
    }
    if config.position != "transformer_xl":
        del shapes["attention.r"]
    arrays = {}
    for name, shape in shapes.items():
        names = [f"layers.{n}.{LAYER[name]}" for n in range(N)]
        stacked = np.stack([keys.take(each, *shape) for each in names])
        arrays[name] = stacked.swapaxes(1, 2) if name.endswith(TRANSPOSED) else stacked
    qkv = arrays.pop("attention.qkv").reshape(N, 3, H, A, D)
    arrays |= {f"attention.{name}": qkv[:, i] for i, name in enumerate("qkv")}
    for name in {"attention.r", "attention.o"} & arrays.keys():
        arrays[name] = arrays[name].reshape(N, H, A, D)
    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    return unflatten_dict(contiguous, sep=".")
