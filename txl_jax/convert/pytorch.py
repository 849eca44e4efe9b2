"""State dicts of the paper's PyTorch code: names, shapes and the order of clusters.

Other code bases differ in names and transpositions: their converters rename the arrays
and call this converter.

Dims: N layers, D model, H heads, A head, F feed-forward, V vocabulary, E embedding,
G clusters, P learned distances.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from txl_jax.convert.pickle import Object, Value
from txl_jax.errors import UserError, refuse
from txl_jax.model import config as models
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import Params
from txl_jax.runtime.storage import DAMAGE, Json

State = dict[str, np.ndarray]  # a state dict
Fields = Mapping[str, Any]  # another code base's config

FREQUENCIES = "pos_emb.inv_freq"  # computed, not trained
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Keys:
    """A state dict from which each array must be taken exactly once.

    The methods take names of the paper's PyTorch code; `rename` returns the name in the
    state dict, which errors contain.
    """

    def __init__(
        self, state: Mapping[str, np.ndarray], rename: Callable[[str], str] = str
    ) -> None:
        if state and all(name.startswith("module.") for name in state):
            # DataParallel adds this prefix.
            state = {name.removeprefix("module."): x for name, x in state.items()}
        self.remaining = {name: x for name, x in state.items() if name != FREQUENCIES}
        self.rename = rename

    def __contains__(self, name: str) -> bool:
        return self.rename(name) in self.remaining

    def count(self, pattern: str) -> int:
        """Returns the number of arrays pattern.format(0), pattern.format(1), ..."""
        numbered = map(pattern.format, itertools.count())
        return sum(1 for _ in itertools.takewhile(self.__contains__, numbered))

    def shape(self, name: str, *dims: int | str) -> tuple[int, ...]:
        """Returns the shape of an array; a letter stands for any positive size.

        Raises UserError for a missing array, another shape or another type.
        """
        expected = str(dims).replace("'", "")
        array = self.remaining.get(self.rename(name), np.zeros((), "O"))
        shape = array.shape
        fits = len(shape) == len(dims) and all(
            n == dim or (n and isinstance(dim, str))
            for n, dim in zip(shape, dims, strict=True)
        )
        if not fits or array.dtype.name not in FLOATS:
            state = f"is {array.dtype} {shape}" if name in self else "is missing"
            raise UserError(
                f"{self.rename(name)} {state}: expected floats of shape {expected}"
            )
        return shape

    def take(self, name: str, *dims: int | str) -> np.ndarray:
        """Removes an array of the shape `dims`, and returns it in float32."""
        self.shape(name, *dims)
        array = self.remaining.pop(self.rename(name))
        return np.ascontiguousarray(array, np.float32)

    def close(self) -> None:
        """Raises UserError unless every array has been taken."""
        for name, array in self.remaining.items():
            raise UserError(
                f"{name[:80]}, of shape {array.shape}, is not part of the model"
            )


def arrays(value: Value, path: Path) -> State:
    """Returns the arrays of an unpickled state dict or module, by name.

    Other values are dropped. Raises UserError if many names share the same bytes.
    """
    result, room = {}, 4 * path.stat().st_size
    try:
        for name, x in _flatten(value) if isinstance(value, Object) else value.items():
            room -= len(name) + getattr(x, "nbytes", 1)
            refuse(room < 0, f"{path} has the same arrays under too many names")
            if isinstance(x, np.ndarray):
                result[name] = x
    except DAMAGE:
        result = {}
    if not result:
        raise UserError(f"{path} contains neither a state dict nor a module")
    return result


def _flatten(module: Object, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yields the submodules, parameters and buffers of a pickled module."""
    yield prefix, None
    for field in ("_parameters", "_buffers"):
        for name, value in module.state.get(field, {}).items():
            yield f"{prefix}{name}", value
    for name, part in module.state.get("_modules", {}).items():
        yield from _flatten(part, f"{prefix}{name}.")


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

    Sizes are inferred from the shapes. Tables and projections are tied if they are
    equal bit for bit or exist once. r_w_bias and r_r_bias are untied if their shape is
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
    sizes, embedding = _read_embedding(keys, tuple(cutoffs))
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
        [int(cutoff) for cutoff in fields["cutoffs"]],
        family,
        mem_len=max(int(fields["mem_len"]), 0),
        clamp_len=max(int(fields["clamp_len"]), 0),
        same_length=bool(fields["same_length"]),
        pre_lnorm=bool(fields["pre_lnorm"]),
        dropout=float(fields["dropout"]),
        dropatt=float(fields["dropatt"]),
    )


def _positions(keys: Keys) -> tuple[Fields, Params, Params]:
    """Returns sizes inferred from u, then u and w, then learned distances."""
    if "r_emb" not in keys:
        bias = keys.remaining.get(keys.rename("r_w_bias"))
        untied = bias is not None and bias.ndim == 3
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


# Embedding and softmax


def _read_embedding(keys: Keys, cutoffs: tuple[int, ...]) -> tuple[Json, Params]:
    """Returns sizes inferred from the tables, and embedding and softmax parameters."""
    name, out_name = "word_emb.emb_layers.{}.weight", "crit.out_layers.{}.weight"
    numbers = range(max(keys.count(name), 1))
    tables = [keys.take(name.format(i), "V", "E") for i in numbers]
    D = keys.shape("layers.0.pos_ff.CoreNet.0.weight", "F", "D")[1]
    V_i, E_i = ([table.shape[axis] for table in tables] for axis in (0, 1))
    # Only a table of width D can lack a projection.
    projected = [E != D or f"word_emb.emb_projs.{i}" in keys for i, E in enumerate(E_i)]
    split = len(tables) > 1 or (projected[0] and D == E_i[0])
    suffixes = [f"_{i}" for i in numbers] if split else [""]
    cutoffs = _cutoffs(keys, V_i, cutoffs)
    params: Params = {}
    for i, suffix in enumerate(suffixes):
        params[f"table{suffix}"] = tables[i]
        if projected[i]:
            proj = keys.take(f"word_emb.emb_projs.{i}", D, E_i[i])
            params[f"proj{suffix}"] = np.ascontiguousarray(proj.T)
    biases = [keys.take(f"crit.out_layers.{i}.bias", V_i[i]) for i in numbers]
    params["bias"] = np.concatenate(biases)
    if cutoffs:
        G = len(cutoffs)
        # The paper's code has the last cluster first; here row g is for cluster g + 1.
        rows = keys.take("crit.cluster_weight", G, E_i[0])
        params["cluster_table"] = rows[::-1].copy()
        params["cluster_bias"] = keys.take("crit.cluster_bias", G)[::-1].copy()
    out_tables: list[np.ndarray] = []
    if any(out_name.format(i) in keys for i in numbers):
        out_tables = [keys.take(out_name.format(i), *tables[i].shape) for i in numbers]
    if not (tied := all(map(_equal, out_tables, tables))):
        names = [f"out_table{suffix}" for suffix in suffixes]
        params |= dict(zip(names, out_tables, strict=True))
    config = {
        "vocab_size": sum(V_i),
        "d_embed": 0 if E_i[0] == D else E_i[0],
        "cutoffs": cutoffs,
        "div_val": _infer_div_val(E_i) if split else 1,
        "tie_weights": tied,
        "tie_projs": _take_out_projs(keys, len(cutoffs) + 1, params),
        "proj_same_dim": not split or all(projected),
    }
    return config, params


def _cutoffs(keys: Keys, sizes: list[int], cutoffs: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the cutoffs inferred from split tables, or else the argument."""
    if implied := tuple(itertools.accumulate(sizes[:-1])):
        if cutoffs not in ((), implied):
            raise UserError(f"cutoffs = {cutoffs} differ from the tables' {implied}")
        return implied
    G = 0
    if "crit.cluster_weight" in keys:
        G, _ = keys.shape("crit.cluster_weight", "G", "E")
    if len(cutoffs) != G:
        raise UserError(
            f"the softmax has {G} clusters beside the frequent words, and a single "
            f"table does not determine their bounds: give {G} cutoffs, not {cutoffs}"
        )
    return cutoffs


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return np.array_equal(x.view(np.int32), y.view(np.int32))


def _take_out_projs(keys: Keys, clusters: int, params: Params) -> tuple[bool, ...]:
    """Adds the softmax's own projections to `params`; returns which ones are tied.

    The softmax has a projection, tied or not, wherever the embedding has one.
    """
    ties = []
    for i in range(clusters):
        shared = params.get("proj" if "table" in params else f"proj_{i}")
        tied = shared is not None
        if shared is not None and (key := f"crit.out_projs.{i}") in keys:
            proj = np.ascontiguousarray(keys.take(key, *shared.T.shape).T)
            if not (tied := _equal(proj, shared)):
                params[f"out_proj_{i}"] = proj
        ties.append(tied)
    return tuple(ties) if any(ties) else ()


def _infer_div_val(widths: Sequence[int]) -> int:
    """Returns the divisor of the width from each cluster to the next."""
    for divisor in range(2, widths[0] + 1):
        if all(width == widths[0] // divisor**i for i, width in enumerate(widths)):
            return divisor
    raise UserError(f"no div_val gives the embedding's tables their widths {widths}")
