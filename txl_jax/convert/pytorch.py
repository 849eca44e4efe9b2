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
from txl_jax.model import families
from txl_jax.model.config import ModelConfig

Fields = Mapping[str, Any]  # of another code base's config

# The arrays of a layer, after "layers.0.", and their shapes; kernels are [out, in].
LAYER = {
    "attention.qkv": ("dec_attn.qkv_net.weight", "QD"),
    "attention.r": ("dec_attn.r_net.weight", "HD"),
    "attention.o": ("dec_attn.o_net.weight", "DH"),
    "attention.norm.scale": ("dec_attn.layer_norm.weight", "D"),
    "attention.norm.bias": ("dec_attn.layer_norm.bias", "D"),
    "feed_forward.in.kernel": ("pos_ff.CoreNet.0.weight", "FD"),
    "feed_forward.in.bias": ("pos_ff.CoreNet.0.bias", "F"),
    "feed_forward.out.kernel": ("pos_ff.CoreNet.3.weight", "DF"),
    "feed_forward.out.bias": ("pos_ff.CoreNet.3.bias", "D"),
    "feed_forward.norm.scale": ("pos_ff.layer_norm.weight", "D"),
    "feed_forward.norm.bias": ("pos_ff.layer_norm.bias", "D"),
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
        families.pytorch,
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
    state: Mapping[str, np.ndarray], fields: Fields, family: Callable[..., ModelConfig]
) -> tuple[ModelConfig, Params]:
    """Returns the model of a state dict and the fields of another code's config.

    Raises an error of DAMAGE for fields that are missing or of a wrong type.
    """
    return from_keys(
        Keys(state),
        fields["cutoffs"],
        family,
        mem_len=max(int(fields["mem_len"]), 0),
        clamp_len=max(int(fields["clamp_len"]), 0),
        same_length=bool(fields["same_length"]),
        pre_lnorm=bool(fields["pre_lnorm"]),
        dropout=float(fields["dropout"]),
        dropatt=float(fields["dropatt"]),
    )


def _positions(keys: Keys) -> tuple[Fields, Params, Params]:
    """Returns the sizes that u implies, then u and w, then learned distances."""
    if "r_emb" not in keys:
        untied = keys.rank("r_w_bias") == 3
        shape = keys.shape("r_w_bias", *("NHA" if untied else "HA"))
        sizes = {"n_head": shape[-2], "d_head": shape[-1], "untie_r": untied}
        u, w = (keys.take(name, *shape) for name in ("r_w_bias", "r_r_bias"))
        return sizes, {"u": u, "w": w}, {}
    N, P, H, A = keys.shape("r_emb", *"NPHA")
    distances = {
        "distances": keys.take("r_emb", N, P, H, A),
        "distance_bias": keys.take("r_bias", N, P, H),
    }
    learned = {"n_head": H, "d_head": A, "position": "shaw_biased", "n_position": P}
    return learned, {"u": keys.take("r_w_bias", N, H, A)}, distances


def _read_layers(config: ModelConfig, keys: Keys) -> Params:
    """Returns the stacked parameters of all layers."""
    N, D, H, A = config.n_layer, config.d_model, config.n_head, config.d_head
    sizes = {"D": D, "F": config.d_inner, "H": H * A, "Q": 3 * H * A}
    arrays = {}
    for name, (theirs, dims) in LAYER.items():
        if name == "attention.r" and config.position != "transformer_xl":
            continue
        shape = [sizes[dim] for dim in dims]
        stacked = np.stack(
            [keys.take(f"layers.{n}.{theirs}", *shape) for n in range(N)]
        )
        arrays[name] = stacked.swapaxes(1, 2) if name.endswith(TRANSPOSED) else stacked
    qkv = arrays.pop("attention.qkv").reshape(N, 3, H, A, D)
    arrays |= {f"attention.{name}": qkv[:, i] for i, name in enumerate("qkv")}
    for name in {"attention.r", "attention.o"} & arrays.keys():
        arrays[name] = arrays[name].reshape(N, H, A, D)
    contiguous = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    return unflatten_dict(contiguous, sep=".")
