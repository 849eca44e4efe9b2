"""Checkpoints of the paper's TensorFlow code: names and shapes of the variables.

Dims: V vocabulary, E embedding, G clusters.
"""

import itertools
import re
from pathlib import Path

import numpy as np

from txl_jax.convert import bundle, pytorch
from txl_jax.convert.embedding import Params
from txl_jax.convert.keys import Keys
from txl_jax.errors import prefixed
from txl_jax.model import families
from txl_jax.model.config import ModelConfig

ROOT = "transformer/"
EMBED, SOFTMAX = f"{ROOT}adaptive_embed/", f"{ROOT}adaptive_softmax/"
LAYER = f"{ROOT}layer_{{}}/"
BIAS = f"{SOFTMAX}cutoff_{{}}/b"
# The variables by their names in the paper's PyTorch code.
NAMES = {
    "r_w_bias": f"{ROOT}r_w_bias",
    "r_r_bias": f"{ROOT}r_r_bias",
    "layers.{}.dec_attn.qkv_net.weight": f"{LAYER}rel_attn/qkv/kernel",
    "layers.{}.dec_attn.r_net.weight": f"{LAYER}rel_attn/r/kernel",
    "layers.{}.dec_attn.o_net.weight": f"{LAYER}rel_attn/o/kernel",
    "layers.{}.dec_attn.layer_norm.weight": f"{LAYER}rel_attn/LayerNorm/gamma",
    "layers.{}.dec_attn.layer_norm.bias": f"{LAYER}rel_attn/LayerNorm/beta",
    "layers.{}.pos_ff.CoreNet.0.weight": f"{LAYER}ff/layer_1/kernel",
    "layers.{}.pos_ff.CoreNet.0.bias": f"{LAYER}ff/layer_1/bias",
    "layers.{}.pos_ff.CoreNet.3.weight": f"{LAYER}ff/layer_2/kernel",
    "layers.{}.pos_ff.CoreNet.3.bias": f"{LAYER}ff/layer_2/bias",
    "layers.{}.pos_ff.layer_norm.weight": f"{LAYER}ff/LayerNorm/gamma",
    "layers.{}.pos_ff.layer_norm.bias": f"{LAYER}ff/LayerNorm/beta",
    "word_emb.emb_layers.{}.weight": f"{EMBED}cutoff_{{}}/lookup_table",
    "word_emb.emb_projs.{}": f"{EMBED}cutoff_{{}}/proj_W",
    "crit.out_layers.{}.bias": BIAS,
    "crit.out_projs.{}": f"{SOFTMAX}cutoff_{{}}/proj",
    "crit.cluster_weight": f"{SOFTMAX}cutoff_0/cluster_W",
    "crit.cluster_bias": f"{SOFTMAX}cutoff_0/cluster_b",
}
TRANSPOSED = ("kernel", "proj_W", "proj")
CLUSTERS = ("cluster_W", "cluster_b")
# Arrays that are not split into clusters are read as those of the first cluster.
UNSPLIT = {
    f"{EMBED}lookup_table": f"{EMBED}cutoff_0/lookup_table",
    f"{EMBED}proj_W": f"{EMBED}cutoff_0/proj_W",
    f"{SOFTMAX}bias": BIAS.format(0),
}
STEP = "global_step"
# Adam's variables: two for each variable of the model, and two scalars.
ADAM = ("/Adam", "/Adam_1", "beta1_power", "beta2_power")


def read(
    source: str | Path, *, mem_len: int, clamp_len: int = 0, same_length: bool = False
) -> tuple[ModelConfig, Params, int]:
    """Returns the model of a checkpoint, its parameters, and its step or 0.

    `source` is the checkpoint's folder, the prefix of its files or its .index. Sizes,
    clusters and ties are inferred from the variables.
    """
    prefix = bundle.find(source)
    variables = bundle.read(prefix, ADAM)
    step = variables.pop(STEP, np.int64(0))
    state, cutoffs = _arrange(variables)
    with prefixed(prefix):
        config, params = pytorch.from_keys(
            Keys(state, _rename),
            cutoffs,
            families.tensorflow,
            mem_len=mem_len,
            clamp_len=clamp_len,
            same_length=same_length,
        )
    return config, params, int(step)


def _rename(name: str) -> str:
    """Returns the variable's name; `name` is that of the paper's PyTorch code."""
    pattern = re.sub(r"\.\d+", ".{}", name, count=1)
    return NAMES.get(pattern, name).format(*re.findall(r"\.(\d+)", name))


def _arrange(variables: dict[str, np.ndarray]) -> tuple[Params, tuple[int, ...]]:
    """Returns the arrays as the paper's PyTorch code has them, and cutoffs.

    The cutoffs are () if there are no clusters or the tables are split. In TensorFlow's
    code kernels are [in, out], the rows of clusters are in order, and the biases are
    split even if the tables are not.
    """
    state: Params = {}
    for name, x in variables.items():
        x = x[::-1] if name.endswith(CLUSTERS) and x.shape else x
        state[UNSPLIT.get(name, name)] = x.T if name.endswith(TRANSPOSED) else x
    if f"{EMBED}lookup_table" not in variables:
        return state, ()
    names = [name for name in map(BIAS.format, range(len(state))) if name in state]
    biases = [np.ravel(state.pop(name)).astype(np.float32) for name in names]
    if biases:
        state[BIAS.format(0)] = np.concatenate(biases)
    sizes = [len(bias) for bias in biases]
    return state, tuple(itertools.accumulate(sizes[:-1]))
