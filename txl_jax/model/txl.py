"""The Transformer-XL: (parameters, tokens, memory) -> (hidden, memory)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.sharded import target_device
from txl_jax.model.adaptive import EmbeddingAndSoftmax
from txl_jax.model.block import Block
from txl_jax.model.config import ModelConfig, parse_remat
from txl_jax.model.interval import start_call
from txl_jax.model.memory import Memory
from txl_jax.model.modules import Dropout, initial, keep_sums
from txl_jax.model.positions import SCHEMES


class TransformerXL(nn.Module):
    """The model of section 3; `fixed.FixedTransformerXL` is the same for inference.

    Dropout is active exactly when a `dropout` rng is passed. The memory's length comes
    from its shape, so it may change without new parameters.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Creates the layers, the embedding, and the biases outside the layers."""
        config = self.config
        self.layers = nn.scan(
            rematerialize(Block, config),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            # memory, biases, call, R_RD
            in_axes=(0, 0, nn.broadcast, nn.broadcast),
            length=config.n_layer,
            unroll=count_unrolled(config),
            metadata_params={nn.PARTITION_NAME: "N"},
        )(config)
        self.embedding = EmbeddingAndSoftmax(config)
        self.scheme = SCHEMES[config.position]
        self.biases = {name: self._make_bias(name) for name in self.scheme.biases}
        rate = config.outer_dropout or config.dropout
        self.drop_rows = Dropout(rate, config.variational)
        self.drop_R = Dropout(config.dropout)

    def _make_bias(self, name: str) -> Array:
        """Returns a bias of every layer: u or w (the paper's v)."""
        config = self.config
        N, H, A = config.n_layer, config.n_head, config.d_head
        if config.untie_r or self.scheme.untied:
            return self.param(name, initial(config, "NHA"), (N, H, A))
        bias_HA = self.param(name, initial(config, "HA"), (H, A))
        return jnp.broadcast_to(bias_HA, (N, H, A))

    def __call__(
        self,
        tokens_BL: Array,
        memory: Memory,
        *,
        first_BL: Array | None = None,
        length_B: Array | None = None,
        segment_len: int = 0,
    ) -> tuple[Array, Memory]:
        """Returns (hidden_BLD, memory) after one segment, or several together.

        first_BL (bool): a document starts at this token and sees nothing before it;
            with initial_memory = "zeros", one that starts with the segment sees zeros.
        length_B: the number of real tokens per stream (default: all). The others are
            padding at the right end, which never enters the memory.
        segment_len: if above 0, the L tokens are segments of segment_len. The results
            equal those of one call per segment, because layer n of a segment reads only
            layer n - 1 of earlier ones. Not for absolute positions, nor for documents
            with initial_memory = "zeros".
        """
        h_BLD = self.embedding.embed(jnp.asarray(tokens_BL))
        return self.read_inputs(
            h_BLD, memory, first_BL=first_BL, length_B=length_B, segment_len=segment_len
        )

    def read_inputs(
        self, inputs_BLD: Array, memory: Memory, **segment: Any
    ) -> tuple[Array, Memory]:
        """Returns (hidden_BLD, memory) of embeddings instead of tokens.

        A model that is initialized with these has no parameters for tokens; its
        vocab_size may be 0. `**segment`: the keyword arguments of `__call__`.
        """
        config, dtype, L = self.config, self.config.compute_dtype, inputs_BLD.shape[1]
        memory, call = start_call(config, memory, L, **segment)
        h_BLD = inputs_BLD.astype(dtype)
        if self.scheme.embeddings:
            h_BLD += self.scheme.embeddings(config, L).astype(dtype)
        h_BLD = self.drop_rows(h_BLD)
        biases = jax.tree.map(lambda bias_NHA: bias_NHA.astype(dtype), self.biases)
        R_RD = None
        if self.scheme.encoding:
            R_RD = self.scheme.encoding(config, memory.mem_len + L)
            R_RD = self.drop_R(R_RD.astype(dtype))
        h_BLD, (inputs_NBLD, fast) = self.layers(
            h_BLD, memory.layers, biases, call, R_RD
        )
        return self.drop_rows(h_BLD), memory.append(inputs_NBLD, call, fast)

    def nll(
        self, tokens_BL: Array, targets_BL: Array, memory: Memory, **segment: Any
    ) -> tuple[Array, Memory]:
        """Returns (nll_BL in nats, in token order, memory); nll is -log p(target).

        `**segment`: the keyword arguments of `__call__`.
        """
        hidden_BLD, memory = self(tokens_BL, memory, **segment)
        return self.embedding.nll(hidden_BLD, targets_BL), memory

    def logits(
        self, tokens_BL: Array, memory: Memory, **segment: Any
    ) -> tuple[Array, Memory]:
        """Returns (logits_BLV, memory); logits are normalized log-probabilities.

        `**segment`: the keyword arguments of `__call__`.
        """
        hidden_BLD, memory = self(tokens_BL, memory, **segment)
        return self.embedding.log_probs(hidden_BLD), memory


def count_unrolled(config: ModelConfig) -> int:
    """Returns the number of layers in a step of the scan: `unroll`, or the fastest.

    The loop over layers copies kept arrays into and out of stacks. On one H200, the
    training step of enwik8 takes 51 ms with one layer in a step and 37 ms with all. On
    two cores, all layers in a step are 7 to 19 % faster in float32, and 7 to 53 % in
    bfloat16; a step of 12 layers compiles in 9 to 11 instead of 5 seconds. On a TPU
    neither has run.
    """
    fastest = 1 if target_device().platform == "tpu" else config.n_layer
    return min(config.unroll or fastest, config.n_layer)


def rematerialize(block: type[nn.Module], config: ModelConfig) -> type[nn.Module]:
    """Returns the layer; it recomputes all but the arrays of `model.remat_policy`.

    `jax.ad_checkpoint.checkpoint_name` names the arrays.
    """
    base, names = parse_remat(config.remat_policy)
    if base == "none":
        return block
    policies = jax.checkpoint_policies
    keep = {
        "full": None,
        "dots": policies.dots_with_no_batch_dims_saveable,
        "save": policies.save_from_both_policies(
            policies.save_only_these_names(*names), keep_sums
        ),
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    # Without a loop between the passes the compiler would merge the two computations;
    # inside a loop, preventing that only costs time.
    unrolled = count_unrolled(config) == config.n_layer
    return nn.remat(block, prevent_cse=unrolled, policy=keep[base])
