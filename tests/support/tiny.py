"""One tiny Transformer-XL for every test: sizes, parameters, tokens, tolerances.

Dims: as in `txl_jax`; T tokens of several segments.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from tests import reference
from tests.reference import Array, Params
from txl_jax.model.config import ModelConfig
from txl_jax.model.fixed import FixedTransformerXL
from txl_jax.model.memory import Memory
from txl_jax.model.txl import TransformerXL
from txl_jax.sharding.mesh import make_mesh
from txl_jax.sharding.options import MeshConfig
from txl_jax.update.state import abstract_params

# The compiler's defaults; tests/conftest.py sets other options for the process.
OPTIMIZED: dict[str, Any] = {}
if jax.__version_info__ < (0, 11):
    OPTIMIZED |= {"xla_cpu_use_fusion_emitters": True}
    OPTIMIZED |= {"xla_cpu_parallel_codegen_split_count": 32}

# Relative to the largest expected number.
FLOAT32 = 1e-5
BFLOAT16 = 2e-2

# H x A need not be D; V, D, H and F are divisible by the axes of the tests' meshes.
V, D, H, A, F, N = 12, 8, 2, 3, 10, 2
SIZES: dict[str, Any] = dict(vocab_size=V, n_layer=N, d_model=D, n_head=H, d_head=A)
CONFIG = ModelConfig(**SIZES, d_inner=F, mem_len=5, dropout=0.0, kernel="xla")
ALL: dict[str, Any] = {"clamp_len": 3, "same_length": True, "pre_lnorm": True}
MODERN: dict[str, Any] = {"norm": "rms", "feed_forward": "swiglu", "qk_norm": True}
GATED: dict[str, Any] = {"gate": "gru", "pre_lnorm": True}
# The later changes to the layers, together.
KINDS: dict[str, Any] = {**GATED, "position": "alibi"}
FAST: dict[str, Any] = {"fast_weights": True}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"clamp_len": 3},
    {"same_length": True},
    {"pre_lnorm": True},
    ALL,
]


def config(**changes: Any) -> ModelConfig:
    """Returns CONFIG with some fields changed."""
    return dataclasses.replace(CONFIG, **changes)


def reference_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns the config's fields in `tests.reference`."""
    known = {field.name for field in dataclasses.fields(reference.Settings)}
    fields = dataclasses.asdict(config)
    return {name: fields[name] for name in known & fields.keys()}


def make_params(config: ModelConfig = CONFIG, seed: int = 0) -> Params:
    """Returns float32 parameters with no bias at zero and no scale at one.

    They are numpy arrays, so that `tests.reference` reads the same numbers.
    """
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: Any) -> Array:
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + 0.5 * rng.normal(size=leaf.shape)).astype(np.float32)

    shapes = nn.unbox(abstract_params(config))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_tokens(batch_size: int, length: int, seed: int = 1) -> Array:
    """Returns random tokens, int32."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, V, (batch_size, length), dtype=np.int32)


@functools.cache
def compiled(config: ModelConfig, method: str, is_fixed: bool) -> Callable[..., Any]:
    """Returns the model's method, compiled once per config for all tests."""

    def apply(params: Params, *args: Any, **more: Any) -> Any:
        if is_fixed:
            return getattr(FixedTransformerXL(config, params), method)(*args, **more)
        model = TransformerXL(config)
        return model.apply({"params": params}, *args, method=method, **more)

    return jax.jit(apply, static_argnames="segment_len")


def apply(
    config: ModelConfig, params: Any, *args: Any, method: str = "__call__", **more: Any
) -> Any:
    """Returns (result, memory) of the model's method, also for parameters laid out."""
    return compiled(config, method, "layers" not in params)(params, *args, **more)


def read(
    config: ModelConfig, params: Any, tokens_BT: Array, tgt_len: int
) -> tuple[Array, Memory]:
    """Reads tokens segment after segment; returns (hidden_BTD, memory)."""
    memory, pieces = Memory.empty(config, len(tokens_BT)), []
    for begin in range(0, tokens_BT.shape[1], tgt_len):
        tokens_BL = tokens_BT[:, begin : begin + tgt_len]
        hidden_BLD, memory = apply(config, params, tokens_BL, memory)
        pieces.append(hidden_BLD)
    return np.concatenate(pieces, axis=1), memory


def cold_nll(config: ModelConfig, params: Params, tokens_T: Array) -> Array:
    """Returns the oracle's nll of all tokens but the first, read at once."""
    text_1T = tokens_T[None].astype(int)
    memory = reference.empty(config.n_layer, 1, config.d_model)
    settings = reference_settings(config)
    nll_1T, _ = reference.nll(
        params, text_1T[:, :-1], text_1T[:, 1:], memory, **settings
    )
    return nll_1T[0]


@functools.cache
def one_device() -> Mesh:
    """Returns the mesh of the first device."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


def loaded(params: Any = None, **sections: Any) -> Any:
    """Returns a model like `load`, without a vocabulary, on one device."""
    from txl_jax.config import Config
    from txl_jax.workdir.load import Loaded

    config, none = Config(**{"model": CONFIG, **sections}), cast(Any, None)
    return Loaded(TransformerXL(config.model), params, none, config, 1, one_device())


def silent(done: int, total: int) -> None:
    """Shows no progress."""


def assert_close(actual: Any, expected: Any, tolerance: float = FLOAT32) -> None:
    """Compares two pytrees, leaf by leaf, each relative to its largest number."""

    def compare(path: tuple[Any, ...], actual: Any, expected: Any) -> None:
        actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
        np.testing.assert_allclose(
            actual,
            expected,
            rtol=0,
            atol=tolerance * np.abs(expected).max(initial=0),
            equal_nan=False,
            err_msg=jax.tree_util.keystr(path),
        )

    jax.tree_util.tree_map_with_path(compare, actual, expected)


def assert_equal(actual: Any, expected: Any) -> None:
    """Compares two pytrees, leaf by leaf and bit for bit."""

    def compare(path: tuple[Any, ...], actual: Any, expected: Any) -> None:
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(actual, expected, err_msg=name)

    jax.tree_util.tree_map_with_path(compare, actual, expected)


def assert_memory(
    memory: Memory, expected: reference.Memory, tolerance: float = FLOAT32
) -> None:
    """Compares the visible slots and their number."""
    M = memory.mem_len
    h_NBMD, filled_B = reference.padded(expected, M)
    np.testing.assert_array_equal(memory.filled_B, filled_B)
    seen_BM1 = (np.arange(M) >= M - filled_B[:, None])[..., None]
    assert_close(np.where(seen_BM1, memory.h_NBMD, 0), h_NBMD, tolerance)


# Beginnings of the lines on stderr that may precede an error.
PROGRESS = ("data: ", "the model of update ", "memory: ")


def complaint(stderr: str) -> str:
    """Returns the error, the last line of stderr; only progress may precede it."""
    *progress, line = stderr.splitlines()
    assert all(each.startswith(PROGRESS) for each in progress), stderr
    assert line.startswith("txl_jax: ") and stderr.endswith("\n"), stderr
    return line
