"""State dicts of the paper's PyTorch code: names, shapes and the order of clusters.

Other PyTorch code bases differ in a few names: their converters rename the arrays and
call this one.

Dims: N layers, D model, H heads, A head, F feed-forward, V vocabulary, E embedding,
G clusters, P learned distances.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from txl_jax.convert.embedding import Params, read_embedding, write_embedding
from txl_jax.convert.keys import FREQUENCIES, Keys, stack
from txl_jax.errors import UserError
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig

ATTENTION = "layers.{}.dec_attn."
FEED_FORWARD = "layers.{}.pos_ff."


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
    keys = Keys(state)
    if "layers.0.dec_attn.q_net.weight" in keys:
        raise UserError(
            "the state dict has attn_type 2 or 3, absolute positions: only 0 and 1, "
            "relative positions, are supported"
        )
    sizes, embedding = read_embedding(keys, tuple(cutoffs))
    heads, relative, attention = _positions(keys)
    F, D = keys.shape("layers.0.pos_ff.CoreNet.0.weight", "FD")
    config = models.pytorch(
        **sizes,
        **heads,
        n_layer=keys.count("layers.{}.pos_ff.CoreNet.0.weight"),
        d_model=D,
        d_inner=F,
        mem_len=mem_len,
        clamp_len=clamp_len,
        same_length=same_length,
        pre_lnorm=pre_lnorm,
    )
    layers = stack([_layer(keys, n, config) for n in range(config.n_layer)])
    layers["attention"] |= attention
    keys.close()
    params = {"embedding": embedding, "layers": layers, **relative}
    return config, params


def _positions(keys: Keys) -> tuple[dict[str, Any], Params, Params]:
    """Returns the sizes that u implies, then u and w, then learned distances."""
    heads: dict[str, Any]
    if "r_emb" not in keys:
        untied = keys.rank("r_w_bias") == 3
        shape = keys.shape("r_w_bias", "NHA" if untied else "HA")
        heads = {"n_head": shape[-2], "d_head": shape[-1], "untie_r": untied}
        u, w = (keys.take(name, *shape) for name in ("r_w_bias", "r_r_bias"))
        return heads, {"u": u, "w": w}, {}
    N, P, H, A = keys.shape("r_emb", "NPHA")
    heads = {"n_head": H, "d_head": A, "position": "shaw_biased", "n_position": P}
    distances = {
        "distances": keys.take("r_emb", N, P, H, A),
        "distance_bias": keys.take("r_bias", N, P, H),
    }
    return heads, {"u": keys.take("r_w_bias", N, H, A)}, distances


def _layer(keys: Keys, n: int, config: ModelConfig) -> Params:
    D, H, A, F = config.d_model, config.n_head, config.d_head, config.d_inner
    attention, feed = ATTENTION.format(n), FEED_FORWARD.format(n)

    def norm(of: str) -> Params:
        scale, bias = (keys.take(f"{of}layer_norm.{x}", D) for x in ("weight", "bias"))
        return {"scale": scale, "bias": bias}

    def dense(name: str, rows: int, columns: int) -> Params:
        kernel = keys.take(f"{feed}{name}.weight", rows, columns).T
        return {"kernel": kernel, "bias": keys.take(f"{feed}{name}.bias", rows)}

    q, k, v = keys.take(f"{attention}qkv_net.weight", 3 * H * A, D).reshape(3, H, A, D)
    o = keys.take(f"{attention}o_net.weight", D, H * A).T.reshape(H, A, D)
    inner: Params = {"q": q, "k": k, "v": v, "o": o, "norm": norm(attention)}
    if config.position == "transformer_xl":
        r = keys.take(f"{attention}r_net.weight", H * A, D)
        inner["r"] = r.reshape(H, A, D)
    outer = {"in": dense("CoreNet.0", F, D), "out": dense("CoreNet.3", D, F)}
    return {"attention": inner, "feed_forward": {**outer, "norm": norm(feed)}}


def to_state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Returns the state dict that `from_state_dict` reads as these parameters.

    Untied u and w are [N, H, A]; tied arrays appear under both names. Raises UserError
    for positions that the paper's PyTorch code does not have.
    """
    if config.position not in ("transformer_xl", "shaw_biased"):
        raise UserError(
            f'model.position = "{config.position}" does not exist in the paper\'s '
            "PyTorch code: only transformer_xl and shaw_biased do"
        )
    state = write_embedding(config, params["embedding"])
    state["r_w_bias"] = params["u"]
    attention = params["layers"]["attention"]
    if config.position == "shaw_biased":
        state["r_emb"] = attention["distances"]
        state["r_bias"] = attention["distance_bias"]
    else:
        state["r_r_bias"] = params["w"]
        exponents = np.arange(0, config.d_model, 2) / config.d_model
        powers = 10000.0 ** exponents.astype(np.float32).astype(np.float64)
        state[FREQUENCIES] = 1 / powers.astype(np.float32)
    for n in range(config.n_layer):
        state |= _layer_state(config, params["layers"], n)
    return {name: np.ascontiguousarray(x, np.float32) for name, x in state.items()}


def _layer_state(config: ModelConfig, layers: Params, n: int) -> Params:
    D, rows = config.d_model, config.n_head * config.d_head
    attention, feed = layers["attention"], layers["feed_forward"]
    state: Params = {}

    def flat(name: str) -> np.ndarray:
        """Returns [H A, D] of [H, A, D]."""
        return np.asarray(attention[name][n]).reshape(rows, D)

    prefix = ATTENTION.format(n)
    qkv = [flat(name) for name in ("q", "k", "v")]
    state[f"{prefix}qkv_net.weight"] = np.concatenate(qkv)
    if config.position == "transformer_xl":
        state[f"{prefix}r_net.weight"] = flat("r")
    state[f"{prefix}o_net.weight"] = flat("o").T
    state[f"{prefix}layer_norm.weight"] = attention["norm"]["scale"][n]
    state[f"{prefix}layer_norm.bias"] = attention["norm"]["bias"][n]
    prefix = FEED_FORWARD.format(n)
    for name, ours in (("CoreNet.0", "in"), ("CoreNet.3", "out")):
        state[f"{prefix}{name}.weight"] = np.asarray(feed[ours]["kernel"][n]).T
        state[f"{prefix}{name}.bias"] = feed[ours]["bias"][n]
    state[f"{prefix}layer_norm.weight"] = feed["norm"]["scale"][n]
    state[f"{prefix}layer_norm.bias"] = feed["norm"]["bias"][n]
    return state
