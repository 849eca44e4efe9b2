"""Faults that the quick suite must find, each one replacement in one file."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault: `old`, which stands once in the file, becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    tests: str  # paths of the tests that run first


MUTANTS = [
    # The memory.
    Mutant(
        "no stop-gradient",
        "txl_jax/model/memory.py",
        "h_NBKD = jax.lax.stop_gradient(h_NBKD)",
        "h_NBKD = h_NBKD + 0",
        "tests/promises/test_memory_is_stop_gradient.py",
    ),
    Mutant(
        "padding enters the memory",
        "txl_jax/model/memory.py",
        "return jax.lax.dynamic_slice_in_dim(x, start, M, axis - 1)",
        "return jax.lax.slice_in_dim(x, x.shape[axis - 1] - M, None, axis=axis - 1)",
        "tests/model",
    ),
    Mutant(
        "one visible slot too many",
        "txl_jax/model/memory.py",
        "filled_B = filled_B + length_B\n",
        "filled_B = filled_B + length_B + 1\n",
        "tests/model",
    ),
    Mutant(
        "a document start in the padding counts",
        "txl_jax/model/memory.py",
        "starts_BL = first_BL & (position_L < length_B[:, None])",
        "starts_BL = first_BL & (position_L >= 0)",
        "tests/model",
    ),
    Mutant(
        "same_length sees one key too many",
        "txl_jax/model/memory.py",
        "query_L + M + 1 - reach",
        "query_L + M - reach",
        "tests/model",
    ),
    # Attention and its kernels.
    Mutant(
        "the future is visible",
        "txl_jax/kernels/xla.py",
        "(key_K <= newest_L[:, None])",
        "(key_K <= newest_L[:, None] + 1)",
        "tests/kernels/test_xla.py",
    ),
    Mutant(
        "the oldest key is masked",
        "txl_jax/kernels/xla.py",
        "(key_K >= oldest_BL[..., None])",
        "(key_K > oldest_BL[..., None])",
        "tests/kernels/test_xla.py",
    ),
    Mutant(
        "scores are not scaled",
        "txl_jax/kernels/xla.py",
        "score_HBLK *= A**-0.5",
        "score_HBLK *= A**-0.25",
        "tests/kernels/test_xla.py",
    ),
    Mutant(
        "u in place of w",
        "txl_jax/kernels/xla.py",
        "position_HBLA = heads_first(with_bias(q_BLHA, w_HA))",
        "position_HBLA = heads_first(with_bias(q_BLHA, u_HA))",
        "tests/kernels/test_xla.py",
    ),
    Mutant(
        "attention dropout does not rescale",
        "txl_jax/kernels/xla.py",
        "weight_HBLK / (1 - dropout.rate)",
        "weight_HBLK * 1",
        "tests/kernels tests/model",
    ),
    Mutant(
        "one dropout mask for all heads",
        "txl_jax/kernels/hash.py",
        "[:, None] ^ head_H)",
        "[:, None] ^ (head_H * 0))",
        "tests/kernels tests/model/test_dropout.py",
    ),
    Mutant(
        "distances in increasing order",
        "txl_jax/model/positions.py",
        "sinusoid_RD(jnp.arange(R - 1, -1, -1), config.d_model)",
        "sinusoid_RD(jnp.arange(R), config.d_model)",
        "tests/model",
    ),
    Mutant(
        "clamp_len is one too short",
        "txl_jax/model/positions.py",
        "R = min(K, config.clamp_len + 1) if config.clamp_len else K",
        "R = min(K, config.clamp_len) if config.clamp_len else K",
        "tests/model",
    ),
    Mutant(
        "sine and cosine are swapped",
        "txl_jax/model/positions.py",
        "[jnp.sin(angle), jnp.cos(angle)]",
        "[jnp.cos(angle), jnp.sin(angle)]",
        "tests/model",
    ),
    Mutant(
        "the gradient of keys leaves the segment",
        "txl_jax/model/attention.py",
        "grad_BKHA[:, M:]",
        "grad_BKHA[:, : grad_BKHA.shape[1] - M]",
        "tests/model tests/promises/test_gradients.py",
    ),
    Mutant(
        "the memory keeps the layer's output",
        "txl_jax/model/block.py",
        'name="feed_forward")(x_BLD), h_BLD',
        'name="feed_forward")(x_BLD), x_BLD',
        "tests/model",
    ),
    # The vocabulary.
    Mutant(
        "embeddings are not scaled",
        "txl_jax/model/adaptive.py",
        "config.d_model**0.5",
        "config.d_model**0.25",
        "tests/model",
    ),
    Mutant(
        "clusters are counted from the wrong end",
        "txl_jax/model/adaptive.py",
        "first_BLT[..., V0 + i - 1, None]",
        "first_BLT[..., -i, None]",
        "tests/model",
    ),
    Mutant(
        "a cluster's first word is read from the one before",
        "txl_jax/model/adaptive.py",
        "inside_BL = (low <= tokens_BL) & (tokens_BL < high)",
        "inside_BL = (low < tokens_BL) & (tokens_BL < high)",
        "tests/model",
    ),
    # The streams.
    Mutant(
        "a token is skipped between segments",
        "txl_jax/data/streams.py",
        "token_offset += self.length(position)",
        "token_offset += self.length(position) + 1",
        "tests/data/test_streams.py",
    ),
    Mutant(
        "targets are the inputs",
        "txl_jax/data/streams.py",
        "self._read(position.epoch, pair_BL + 1)",
        "self._read(position.epoch, pair_BL)",
        "tests/data/test_streams.py",
    ),
    Mutant(
        "context is scored",
        "txl_jax/data/streams.py",
        "scored_BL = real_BL & (turn_BL >= offset)",
        "scored_BL = real_BL",
        "tests/data/test_streams.py tests/data/test_stream_reference.py",
    ),
    Mutant(
        "memory passes from epoch to epoch",
        "txl_jax/data/streams.py",
        "(wraps_BL | (turn_BL == -lead_B[:, None]))",
        "wraps_BL",
        "tests/data/test_streams.py",
    ),
    # The update.
    Mutant(
        "the loss is divided by the segments, not the tokens",
        "txl_jax/update/step.py",
        "grad / tokens",
        "grad / tokens * 2",
        "tests/update/test_step.py",
    ),
    Mutant(
        "every update draws the same dropout",
        "txl_jax/update/step.py",
        "key = jax.random.fold_in(state.rng, state.step)",
        "key = jax.random.fold_in(state.rng, 0)",
        "tests/update/test_step.py",
    ),
    Mutant(
        "a skipped update keeps its memory",
        "txl_jax/update/step.py",
        "memory=choose(good, memory, fresh)",
        "memory=choose(good, memory, memory)",
        "tests/update",
    ),
    Mutant(
        "a non-finite gradient is applied",
        "txl_jax/update/guard.py",
        "~jnp.isfinite(grad_norm)]",
        "jnp.isnan(grad_norm) & False]",
        "tests/update",
    ),
    Mutant(
        "the clip has no effect",
        "txl_jax/update/optim.py",
        "jnp.where(grad_norm < max_norm, grad,",
        "jnp.where(grad_norm > 0, grad,",
        "tests/update/test_optim.py",
    ),
    Mutant(
        "biases decay",
        "txl_jax/update/optim.py",
        'UNDECAYED = {"scale", "bias",',
        'UNDECAYED = {"scale",',
        "tests/update/test_optim.py",
    ),
    Mutant(
        "the average starts an update late",
        "txl_jax/update/optim.py",
        "(number >= config.asgd_from)",
        "(number > config.asgd_from)",
        "tests/update/test_optim.py",
    ),
    # Checkpoints.
    Mutant(
        "a checksum is not compared",
        "txl_jax/checkpoint/manifest.py",
        "if checksum != manifest.arrays.get(name)",
        "if checksum != checksum",
        "tests/checkpoint tests/faults/test_corruption.py",
    ),
    Mutant(
        "a checksum does not depend on the values",
        "txl_jax/checkpoint/checksum.py",
        "mixed = murmur3(bits + index * jnp.uint32(STEP))",
        "mixed = murmur3(bits * 0 + index * jnp.uint32(STEP))",
        "tests/checkpoint tests/faults/test_corruption.py",
    ),
    Mutant(
        "the worst checkpoint is the best",
        "txl_jax/checkpoint/manifest.py",
        "return nll, -self.step",
        "return -nll, -self.step",
        "tests/checkpoint",
    ),
    # Conversion.
    Mutant(
        "queries and keys are swapped",
        "txl_jax/convert/pytorch.py",
        'qkv[:, i] for i, name in enumerate("qkv")',
        'qkv[:, i] for i, name in enumerate("kqv")',
        "tests/convert/test_pytorch.py",
    ),
    Mutant(
        "r_r_bias is read as r_w_bias",
        "txl_jax/convert/pytorch.py",
        'for name in ("r_w_bias", "r_r_bias")',
        'for name in ("r_r_bias", "r_w_bias")',
        "tests/convert/test_pytorch.py",
    ),
    # Evaluation.
    Mutant(
        "the first token counts as scored",
        "txl_jax/evaluate/perplexity.py",
        "scored = len(tokens) - 1",
        "scored = len(tokens)",
        "tests/evaluate/test_perplexity.py",
    ),
]
