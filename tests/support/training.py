"""Training of a small model on a text, without the loop around it.

Dims: S segments, B streams, L segment, T = S L tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.reference import Array, Params
from txl_jax.model.config import ModelConfig
from txl_jax.model.memory import Memory
from txl_jax.model.segment import Segment
from txl_jax.model.txl import TransformerXL
from txl_jax.update.optim import Schedule
from txl_jax.update.options import TrainConfig
from txl_jax.update.state import TrainState
from txl_jax.update.step import TrainStep


def train(
    config: ModelConfig,
    params: Params,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    text_BT: Array,
    tgt_len: int,
) -> dict[str, Any]:
    """Returns the metrics of one update per segment of a text of T + 1 tokens."""
    B, L, S = len(text_BT), tgt_len, (text_BT.shape[1] - 1) // tgt_len

    def cut(tokens_BT: Array) -> Array:
        return np.stack(np.split(tokens_BT.astype(np.int32), S, axis=1))

    segments = Segment(
        inputs_SBL=cut(text_BT[:, :-1]),
        targets_SBL=cut(text_BT[:, 1:]),
        weights_SBL=np.ones((S, B, L), np.float32),
        first_SBL=np.zeros((S, B, L), bool),
        length_SB=np.full((S, B), L, np.int32),
    )
    params = jax.tree.map(jnp.asarray, params)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=jax.jit(optimizer.init)(params),
        memory=Memory.empty(config, B),
        rng=jax.random.key(0),
    )
    options = TrainConfig(
        num_steps=S, batch_size=B, tgt_len=L, segments_per_call=S, eval_every=S
    )
    step = TrainStep(TransformerXL(config), optimizer, schedule, options)
    return jax.jit(step)(state, segments)[1]
