"""Faults that the quick suite must find, each one replacement in one file."""

import re
from typing import NamedTuple

# Files of the package, each with its faults: a name, the tests that run first, the code
# to replace, which must occur once in the file, and the faulty code.
FAULTS = """
model/memory/cache.py
  no stop-gradient: promises/test_gradients.py
    - jax.lax.stop_gradient(h_NBLD.astype(self.h_NBMD.dtype))
    + h_NBLD.astype(self.h_NBMD.dtype)
model/memory/interval.py
  padding enters the memory: model
    - return jax.lax.dynamic_slice_in_dim(x, start, M, axis=1)
    + return jax.lax.slice_in_dim(x, x.shape[1] - M, None, axis=1)
  one visible slot too many: model
    - filled_B = filled_B + length_B
    + filled_B = filled_B + length_B + 1
  a document start in the padding counts: model
    - starts_BL = first_BL & (position_L < length_B[:, None])
    + starts_BL = first_BL & (position_L >= 0)
  same_length sees one key too many: model
    - query_L + M + 1 - keys_per_query
    + query_L + M - keys_per_query
  a segment sees more than M keys before it: model/test_parallel_segments.py
    - oldest = jnp.maximum(oldest, query_L // segment_len * segment_len)
    + oldest = jnp.maximum(oldest, 0)
kernels/xla.py
  the future is visible: kernels/test_xla.py
    - (key_K <= newest_L[:, None])
    + (key_K <= newest_L[:, None] + 1)
  the oldest key is masked: kernels/test_xla.py
    - (key_K >= oldest_BL[..., None])
    + (key_K > oldest_BL[..., None])
  scores are not scaled: kernels/test_xla.py
    - score_HBLK *= A**-0.5
    + score_HBLK *= A**-0.25
  u instead of w: kernels/test_xla.py
    - position_HBLA = heads_first(with_bias(q_BLHA, w_HA))
    + position_HBLA = heads_first(with_bias(q_BLHA, u_HA))
  attention dropout does not rescale: kernels model
    - weight_HBLK / (1 - dropout.rate)
    + weight_HBLK * 1
kernels/cudnn.py
  hidden keys are visible: kernels/test_cudnn.py
    - return jnp.where(visible_BLK(oldest_BL, K), score_HBLK, far)
    + return score_HBLK
  keys of padding are visible: kernels/test_cudnn.py
    - "edge") + front
    + "edge")
  distances are off by one: kernels/test_cudnn.py
    - realign(pad_front(score_HBLR, Y - R + 1))
    + realign(pad_front(score_HBLR[..., 1:], Y - R + 2))
  gradients move to the next distance: kernels/test_cudnn.py
    - pad_front(grad_HBYL, 1, axis=2)
    + jnp.pad(grad_HBYL, ((0, 0), (0, 0), (0, 1), (0, 0)))
  nearest keys have the farthest keys' gradient: kernels/test_cudnn.py
    - grad_HBLK[..., K - Y :]
    + grad_HBLK[..., :Y]
kernels/cluster.py
  tokens beyond the expected ones have no loss: model/test_adaptive.py
    - fori_loop(fixed, (tokens.size + X - 1) // X, turn, carry)
    + fori_loop(fixed, fixed or (tokens.size + X - 1) // X, turn, carry)
kernels/hash.py
  one dropout mask for all heads: kernels model/test_dropout.py
    - [:, None] ^ head_H)
    + [:, None] ^ (head_H * 0))
model/positions.py
  distances in increasing order: model
    - sinusoid_RD(jnp.arange(R - 1, -1, -1), config.d_model)
    + sinusoid_RD(jnp.arange(R), config.d_model)
  clamp_len is one too short: model
    - return min(K, config.clamp_len + 1) if config.clamp_len else K
    + return min(K, config.clamp_len) if config.clamp_len else K
  sine and cosine are swapped: model
    - [jnp.sin(angle), jnp.cos(angle)]
    + [jnp.cos(angle), jnp.sin(angle)]
  a bias of buckets is divided by the root of the head size: model/test_positions.py
    - biases["buckets"].astype(jnp.float32) * config.d_head**0.5
    + biases["buckets"].astype(jnp.float32)
model/attention.py
  the gradient of keys leaves the segment: model promises/test_gradients.py
    - grad_BKHA[:, n_constant:]
    + grad_BKHA[:, : grad_BKHA.shape[1] - n_constant]
  the norm of a memory's keys gets no gradient: promises/test_gradients.py
    - x_BKD, n_constant = norm(h_BKD), 0
    + x_BKD = norm(h_BKD)
model/memory/halo.py
  the oldest states of a piece are passed on: model/test_halo.py
    - newest_BMD = h_YXD[:, h_YXD.shape[1] - M :]
    + newest_BMD = h_YXD[:, :M]
model/block.py
  the memory keeps the layer's output: model
    - layer, kept, h_BLD, oldest_BL
    + layer, h_BLD, h_BLD, oldest_BL
model/gate.py
  the gate is open where it should be closed: model
    - return (1 - z_BLD) * x_BLD + z_BLD * new_BLD
    + return z_BLD * x_BLD + (1 - z_BLD) * new_BLD
model/memory/key_values.py
  an evaluation keeps a layer's inputs: model/test_key_values.py
    - jnp.concatenate([x_BKHA[:, :M], own_BLHA], axis=1)
    + x_BKHA
model/memory/compressive.py
  slots of the document before stay visible: model/test_compressive.py
    - slots_B = jnp.where(last_B < 0, slots_B, 0)
    + slots_B = jnp.where(last_B < L, slots_B, 0)
  the reconstruction trains the attention: model/test_compressive.py
    - jax.lax.stop_gradient(nn.unbox(attention))
    + nn.unbox(attention)
model/memory/retrieval.py
  a query retrieves a key that its local attention sees: model/test_retrieval.py
    - stop_BL, q_BLHA = own.oldest_BL, own.q_BLHA
    + stop_BL, q_BLHA = own.oldest_BL + 1, own.q_BLHA
  stored keys are not normalized: model/test_retrieval.py
    - jax.vmap(put)(memory.k_BHTA, slot_BL, normalize(k_BLHA))
    + jax.vmap(put)(memory.k_BHTA, slot_BL, k_BLHA)
model/memory/memory_tokens.py
  written tokens start from the document before: model/test_memory_tokens.py
    - unless(last_start(length_B, first_BL) >= 0)
    + unless(first_BL[:, 0])
  no gradient passes to what a segment writes: model/test_memory_tokens.py
    - (kept[:, :, W : W + L], written_BWD)
    + (kept[:, :, W : W + L], jax.lax.stop_gradient(written_BWD))
model/adaptive.py
  embeddings are not scaled: model
    - config.d_model**0.5
    + config.d_model**0.25
  clusters are counted from the wrong end: model
    - first_BLC[..., V0 + i - 1, None]
    + first_BLC[..., -i, None]
  a cluster's first word is read from the one before: model
    - inside_BL = (low <= tokens_BL) & (tokens_BL < high)
    + inside_BL = (low < tokens_BL) & (tokens_BL < high)
data/streams.py
  a token is skipped between segments: data/test_streams.py
    - token_offset += self.length(position)
    + token_offset += self.length(position) + 1
  targets are the inputs: data/test_streams.py
    - self._read(position.epoch, pair_BL + 1)
    + self._read(position.epoch, pair_BL)
  context is scored: data/test_streams.py
    - scored_BL = real_BL & (turn_BL >= offset)
    + scored_BL = real_BL
  memory passes from epoch to epoch: data/test_streams.py
    - first_BL = wraps_BL | starts_BL
    + first_BL = wraps_BL
update/step.py
  the loss is divided by the segments, not the tokens: update/test_step.py
    - grad / tokens
    + grad / tokens * 2
  every update draws the same dropout: update/test_step.py
    - key = jax.random.fold_in(state.rng, state.step)
    + key = jax.random.fold_in(state.rng, 0)
  a skipped update keeps its memory: update
    - return dataclasses.replace(state, memory=fresh)
    + return state
  a non-finite gradient is applied: update
    - ~jnp.isfinite(grad_norm)]
    + jnp.isnan(grad_norm) & False]
update/optim.py
  the clip has no effect: update/test_optim.py
    - jnp.where(grad_norm < max_norm, grad,
    + jnp.where(grad_norm > 0, grad,
  biases decay: update/test_optim.py
    - UNDECAYED = {"scale", "bias",
    + UNDECAYED = {"scale",
  the average starts an update late: update/test_optim.py
    - (number >= config.asgd_from)
    + (number > config.asgd_from)
checkpoint/manifest.py
  a checksum is not compared: checkpoint faults/test_corruption.py
    - if checksum != manifest.arrays.get(name)
    + if checksum != checksum
  the worst checkpoint is the best: checkpoint
    - return -min(ranks)[1] if ranks else None
    + return -max(ranks)[1] if ranks else None
  a checksum does not depend on the values: checkpoint faults/test_corruption.py
    - mixed = murmur3(bits + index * jnp.uint32(STEP))
    + mixed = murmur3(bits * 0 + index * jnp.uint32(STEP))
convert/pytorch.py
  queries and keys are swapped: promises/test_published_models.py
    - qkv[:, i] for i, name in enumerate("qkv")
    + qkv[:, i] for i, name in enumerate("kqv")
  r_r_bias is read as r_w_bias: promises/test_published_models.py
    - for name in ("r_w_bias", "r_r_bias")
    + for name in ("r_r_bias", "r_w_bias")
update/options.py
  a call passes the next validation: test_train.py update cli
    - if min(*left, self.num_steps - step) >= full else 1
    + if self.num_steps - step >= full else 1
evaluate/dynamic.py
  the pull leads away from the trained parameters: evaluate/test_dynamic.py
    - jnp.minimum(decay * r, 1) * (theta_0 - theta)
    + jnp.minimum(decay * r, 1) * (theta - theta_0)
  the statistics are mean squares without a root: evaluate/test_dynamic.py
    - jax.tree.map(jnp.sqrt, squares)
    + jax.tree.map(jnp.square, squares)
  the memory starts again with every segment: evaluate/test_dynamic.py
    - return (jax.tree.map(update, params, trained, grads, rms), memory), nll
    + return (jax.tree.map(update, params, trained, grads, rms), carry[1]), nll
evaluate/perplexity.py
  the first token counts as scored: evaluate/test_perplexity.py
    - scored = len(tokens) - 1
    + scored = len(tokens)
"""


class Mutant(NamedTuple):
    """One fault: `old`, which occurs once in the file, becomes `new`."""

    name: str
    path: str
    old: str
    new: str
    tests: list[str]  # paths of the tests that run first


MUTANTS = [
    Mutant(name, f"txl_jax/{path}", old, new, [f"tests/{x}" for x in tests.split()])
    for path, faults in re.findall(r"^(\S+)\n((?: .+\n)+)", FAULTS, re.M)
    for name, tests, old, new in re.findall(
        r"  (.+): (.+)\n    - (.+)\n    \+ (.+)\n", faults
    )
]
