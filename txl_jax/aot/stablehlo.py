"""A model as StableHLO programs, which run without this package (`jax.export`).

One function, (parameters, tokens_BL, length_B, memory) -> (log_probs_BLV, memory), is
compiled for segments of L tokens and for single ones. Parameters and memory are dicts
of arrays; the memory has the fields of `NewestKeyValues`. B is any number of streams.

Dims: as in `txl_jax`.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import traverse_util
from jax import Array, export

from txl_jax.data import vocab as vocabulary
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.model.calls import fixed_model
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.key_values import KeyValueMemory, NewestKeyValues
from txl_jax.model.memory.kinds import choose_kind

PLATFORMS = ("cpu", "cuda", "tpu")
LOADER = Path(__file__).with_name("stablehlo_loader.py")
Arrays = dict[str, Array]


def save(
    config: ModelConfig, params: Params, vocab: Vocab, tgt_len: int, folder: Path
) -> None:
    """Writes the programs, parameters, vocabulary, loader and README to a folder.

    The memory has config.mem_len tokens, a segment tgt_len. Raises UserError for a
    model whose memory has more than keys and values.
    """
    if choose_kind(config).field or config.in_sequence or not config.mem_len:
        raise UserError(
            "--format=stablehlo exports the paper's memory, as keys and values: set "
            "generate.mem_len above 0, for a model with no other kind of memory and "
            'model.recurrence = "below"'
        )
    if not importlib.util.find_spec("flatbuffers"):
        raise UserError(
            "--format=stablehlo needs flatbuffers: pip install 'txl_jax[stablehlo]'"
        )
    config = dataclasses.replace(config, kernel="xla")
    _, lay_out = fixed_model(config)
    fixed = jax.jit(lay_out)(params)
    flat: Arrays = traverse_util.flatten_dict(fixed, sep="/")
    folder.mkdir()
    for name, L in (("segment", tgt_len), ("token", 1)):
        program = export_call(config, flat, L).serialize()
        (folder / f"{name}.stablehlo").write_bytes(program)
    # Key and value of a zero state, with which a memory may start.
    first = KeyValueMemory.empty(config, fixed, 1, 0, mem_len=1).newest()._asdict()
    arrays = {**flat, **{f"memory/{name}": x for name, x in first.items()}}
    host = {name: np.ascontiguousarray(x) for name, x in jax.device_get(arrays).items()}
    # Only the owner could read a file that `save_file` wrote.
    (folder / "parameters.safetensors").write_bytes(safetensors.numpy.save(host))
    sizes = {"tgt_len": tgt_len, "mem_len": config.mem_len}
    (folder / "config.json").write_text(
        json.dumps(sizes | {"model": dataclasses.asdict(config)}, indent=2) + "\n"
    )
    (folder / "vocab.json").write_text(vocabulary.dumps(vocab) + "\n", "utf-8")
    loader = LOADER.read_text("utf-8")
    (folder / "loader.py").write_text(loader, "utf-8")
    readme = README.format(**sizes, kind=vocab.kind, types=len(vocab), loader=loader)
    (folder / "README.md").write_text(readme, "utf-8")


def export_call(config: ModelConfig, params: Arrays, L: int) -> export.Exported:
    """Returns the exported function for calls of L tokens."""
    model, _ = fixed_model(config)

    def call(
        params: Arrays, tokens_BL: Array, length_B: Array, memory: Arrays
    ) -> tuple[Array, Arrays]:
        fixed = traverse_util.unflatten_dict(params, sep="/")
        empty = KeyValueMemory.empty(config, fixed, tokens_BL.shape[0], L)
        result = model.apply(
            {"params": fixed},
            tokens_BL,
            empty.resume(NewestKeyValues(**memory)),
            length_B=length_B,
            method="logits",
        )
        log_probs_BLV, after = result
        return log_probs_BLV, after.newest()._asdict()  # type: ignore[union-attr]

    (B,) = export.symbolic_shape("B")
    N, H, M, A = config.n_layer, config.n_head, config.mem_len, config.d_head
    states = jax.ShapeDtypeStruct((N, H, B, M, A), config.compute_dtype)
    memory = {
        "k_NHBMA": states,
        "v_NHBMA": states,
        "filled_B": jax.ShapeDtypeStruct((B,), jnp.int32),
    }
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tokens = jax.ShapeDtypeStruct((B, L), jnp.int32)
    length = jax.ShapeDtypeStruct((B,), jnp.int32)
    compile_for = export.export(jax.jit(call), platforms=PLATFORMS)
    return compile_for(like, tokens, length, memory)


README = """# A Transformer-XL as StableHLO

Two programs of one function,

    (parameters, tokens_BL, length_B, memory) -> (log_probs_BLV, memory)

for any number of streams B on {platforms}: `segment.stablehlo` reads L = {{tgt_len}}
tokens and `token.stablehlo` one. The first length_B[b] tokens of stream b are real
(int32). The memory holds the keys and values of the newest {{mem_len}} tokens,
k_NHBMA and v_NHBMA, and the number of visible ones, filled_B. log_probs_BLV are natural
logarithms, after each token. The attention is XLA's: no kernel of the
package is inside.

    pip install jax safetensors flatbuffers

(`jax.export` reads its files with flatbuffers.) `vocab.json` describes the {{types}}
tokens, of kind `{{kind}}`; of kind `byte`, a token is a byte. `parameters.safetensors`
has the parameters and, as `memory/...`, an empty memory of one token. `config.json` has
the sizes.

```python
from loader import Model

model = Model(".")
log_probs_BV, memory = model.read([[1, 2, 3]], model.empty(1))
log_probs_BV, memory = model.read(log_probs_BV.argmax(-1)[:, None], memory)
```

`loader.py`, which needs nothing else:

```python
{{loader}}```

Other runtimes: `jax.export.deserialize(...).mlir_module()` is the program as text, for
compilers of StableHLO such as XLA's PJRT plugins and IREE. None of them has been tried.
JAX promises to read such files for six months: docs.jax.dev/en/latest/export.
""".format(platforms=", ".join(PLATFORMS))
