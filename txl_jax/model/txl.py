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
from txl_jax.model.dropout import Dropout
from txl_jax.model.initializers import Layout, initial, keep_sums
from txl_jax.model.memory.interval import count_keys, find_oldest
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.memory.protocol import AnyMemory, Call, Kept
from txl_jax.model.positions import SCHEMES


class TransformerXL(nn.Module):
    """The model of section 3.

    Dropout is active exactly when a `dropout` rng is passed. The memory's length comes
    from its shape, so it may change without new parameters.

    layout: "stacked" parameters, which the layers are scanned over, or "separate" ones
        for each layer, as `calls.fixed_model` lays them out; the memory is then a
        `KeyValueMemory` or, for one token at a time, a `RingMemory`.
    """

    config: ModelConfig
    layout: Layout = "stacked"

    def setup(self) -> None:
        """Creates the layers, the embedding, and the biases outside the layers."""
        config, self.kind = self.config, choose_kind(self.config)
        if self.layout == "separate":
            layers = range(config.n_layer)
            self.layers: Any = [Block(config, self.layout) for _ in layers]
        else:
            self.layers = nn.scan(
                rematerialize(Block, config),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                # layer, oldest_BL, biases, R_RD
                in_axes=(0, nn.broadcast, 0, nn.broadcast),
                length=config.n_layer,
                unroll=count_unrolled(config),
                metadata_params={nn.PARTITION_NAME: "N"},
            )(config)
        self.embedding = EmbeddingAndSoftmax(config)
        self.scheme = SCHEMES[config.position]
        self.biases = {name: self._make_bias(name) for name in self.scheme.biases}
        self.drop_rows = Dropout(config.dropout, config.variational)
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
        memory: AnyMemory,
        *,
        first_BL: Array | None = None,
        length_B: Array | None = None,
    ) -> tuple[Array, AnyMemory]:
        """Returns (hidden_BLD, memory) after a segment; `calls` reads several.

        first_BL (bool): a document starts at this token and sees nothing before it;
            with initial_memory = "zeros", one that starts with the segment sees zeros.
        length_B: the number of real tokens per stream (default: all). The others are
            padding at the right end, which never enters the memory.
        """
        h_BLD = self.enter(self.embedding.embed(jnp.asarray(tokens_BL)))
        h_BLD, memory = self.advance(h_BLD, memory, first_BL, length_B)
        return self.drop_rows(h_BLD), memory

    def enter(self, h_BLD: Array) -> Array:
        """Returns the first layer's input, given embeddings."""
        if self.scheme.embeddings:
            position_LD = self.scheme.embeddings(self.config, h_BLD.shape[1])
            h_BLD += position_LD.astype(self.config.compute_dtype)
        return self.drop_rows(h_BLD)

    def advance(
        self,
        h_BLD: Array,
        memory: Any,
        first_BL: Array | None,
        length_B: Array | None,
        segment_len: int = 0,
    ) -> tuple[Array, Any]:
        """Returns (the last layer's output, memory); segment_len: as in `calls`."""
        kind, M, L = self.kind, memory.mem_len, h_BLD.shape[1]
        memory, first_BL = kind.begin(memory, first_BL)
        keys = count_keys(self.config, M)
        oldest_BL = find_oldest(memory.filled_B, first_BL, M, L, keys, segment_len)
        opened = kind.open(memory, Call(L, first_BL, length_B))
        h_BLD, kept = self.run_layers(h_BLD, opened.layers, oldest_BL, M)
        return h_BLD, opened.append(kept, length_B, first_BL)

    def run_layers(
        self, h_BLD: Array, layers: Any, oldest_BL: Array, M: int
    ) -> tuple[Array, Kept]:
        """Returns (the last layer's output, what the memory keeps of all layers)."""
        if self.layout == "separate":
            entries = []
            for block, layer in zip(self.layers, layers, strict=True):
                h_BLD, kept = block(h_BLD, layer, oldest_BL)
                entries.append(kept)
            return h_BLD, entries
        dtype = self.config.compute_dtype
        biases = jax.tree.map(lambda bias_NHA: bias_NHA.astype(dtype), self.biases)
        R_RD = None
        if self.scheme.encoding:
            K = M + h_BLD.shape[1]
            R_RD = self.drop_R(self.scheme.encoding(self.config, K).astype(dtype))
        return self.layers(h_BLD, layers, oldest_BL, biases, R_RD)

    def nll(
        self, tokens_BL: Array, targets_BL: Array, memory: AnyMemory, **segment: Any
    ) -> tuple[Array, AnyMemory]:
        """Returns (nll_BL in nats, in token order, memory); nll is -log p(target).

        `**segment`: the keyword arguments of `__call__`.
        """
        hidden_BLD, memory = self(tokens_BL, memory, **segment)
        return self.embedding.nll(hidden_BLD, targets_BL), memory

    def logits(
        self, tokens_BL: Array, memory: AnyMemory, **segment: Any
    ) -> tuple[Array, AnyMemory]:
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
    """Returns a layer that keeps only its input and what `model.remat_policy` names.

    `jax.ad_checkpoint.checkpoint_name` gives its arrays these names.
    """
    kind, names = parse_remat(config.remat_policy)
    if kind == "none":
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
    return nn.remat(block, prevent_cse=unrolled, policy=keep[kind])
