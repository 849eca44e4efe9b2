"""Fast weights: a gated delta rule over the states that leave the memory.

Beside the paper's memory, each head of each layer has a matrix S that maps keys to
values. A state that leaves the memory updates S by the gated delta rule (Yang et al.
2024, Gated DeltaNet), and each query reads S. With the keys of [memory; segment]
numbered from 0, query i attends to keys up to i + M and reads the matrix S_i of all
keys before i, which therefore does not depend on where segments begin:

    k_j = unit(silu(W_k x_{j-1}))    q_i = unit(silu(W_k x_{i+M}))    v_j = W_v x_j
    b_j = sigmoid(w_b x_j)           a_j = sigmoid(w_a x_j)
    S_{j+1} = a_j S_j + b_j (v_j - a_j S_j k_j) k_j^T
    o_i <- o_i + sigmoid(w_g x_{i+M}) S_i q_i

A value is stored under the key of the state before it, so a read returns the value that
followed the most recent similar state; a document's first state has its own key. W_k
and W_v are the attention's, with `k_norm` if there is one, before any rotation; since
W_k also makes the queries, the loss trains it through reads even without gradients
across segments. S is float32, and no gradient flows into it where a call begins.

Dims: P chunks of C (Y) steps, U values (= A), K = M + L, X = L + 1, J: b and log a.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.config import ModelConfig
from txl_jax.model.interval import Call, count_filled, window
from txl_jax.model.modules import initial, normal

CHUNK = 16
# The initial logits of b, a and the gate: half of a value is written, S forgets 0.5 %
# with each state, and reads are multiplied by 0.12.
BIASES = (0.0, 5.3, -2.0)
# The default may round factors to bfloat16 or TF32.
exact_einsum = functools.partial(jnp.einsum, precision="highest")


class LayerWeights(NamedTuple):
    """The fast weights of one layer, or of all layers, stacked; see `FastState`."""

    S_BHUA: Array
    k_BHA: Array
    rate_BMHJ: Array | None  # after a layer's call, of all K states


@flax.struct.dataclass
class FastState:
    """The fast weights of all states of a document that are older than the memory.

    S_NBHUA, k_NBHA: the matrices, and the key of the newest state that has left, 0 if
        it was not written (float32).
    read_B: the number of tokens read of the document, at most M + 1 (int32).
    rate_NBMHJ: the rates of the memory's states, if it has only keys and values.
    """

    S_NBHUA: Array
    k_NBHA: Array
    read_B: Array
    rate_NBMHJ: Array | None = None

    @classmethod
    def empty(cls, config: ModelConfig, batch_size: int) -> "FastState":
        """Returns fast weights that have seen nothing."""
        N, H, A = config.n_layer, config.n_head, config.d_head
        S_NBHUA = jnp.zeros((N, batch_size, H, A, A), jnp.float32)
        k_NBHA = jnp.zeros((N, batch_size, H, A), jnp.float32)
        return cls(S_NBHUA, k_NBHA, jnp.zeros(batch_size, jnp.int32))

    @property
    def layers(self) -> LayerWeights:
        """The layers' fast weights, stacked."""
        return LayerWeights(self.S_NBHUA, self.k_NBHA, self.rate_NBMHJ)

    def append(self, layers: LayerWeights, call: Call, M: int) -> "FastState":
        """Returns the state after a call, given the layers' new fast weights."""
        S_NBHUA, k_NBHA, rate_NBKHJ = jax.lax.stop_gradient(layers)
        read_B = count_filled(self.read_B, M + 1, call.length_B, call.first_BL)
        if rate_NBKHJ is None:
            return FastState(S_NBHUA, k_NBHA, read_B)
        rate_NBMHJ = window(rate_NBKHJ, call.length_B, M)
        return FastState(S_NBHUA, k_NBHA, read_B, rate_NBMHJ)

    def reset(self, where_B: Array) -> "FastState":
        """Returns the state with nothing seen in the streams where_B (bool)."""

        def clear(x_NB: Array) -> Array:
            return jnp.where(where_B.reshape(-1, *[1] * (x_NB.ndim - 2)), 0, x_NB)

        read_B = jnp.where(where_B, 0, self.read_B)
        return FastState(
            clear(self.S_NBHUA), clear(self.k_NBHA), read_B, self.rate_NBMHJ
        )


class FastWeights(nn.Module):
    """Reads and writes the fast weights of one layer."""

    config: ModelConfig

    def setup(self) -> None:
        """Creates w_b, w_a and w_g, with biases."""
        H, init = self.config.n_head, initial(self.config, "DH")
        dense = functools.partial(nn.Dense, H, dtype=jnp.float32, kernel_init=init)
        biases = (normal(0, "H", mean=bias) for bias in BIASES)
        self.write, self.decay, self.gate = (dense(bias_init=x) for x in biases)

    def find_rates(self, x_BKD: Array) -> Array:
        """Returns b and log a of states, rate_BKHJ."""
        write_BKH, decay_BKH = self.write(x_BKD), self.decay(x_BKD)
        return jnp.stack([nn.sigmoid(write_BKH), nn.log_sigmoid(decay_BKH)], axis=-1)

    def __call__(
        self,
        o_BLHA: Array,
        x_BKD: Array,
        k_BLHA: Array,
        left: tuple[Array, Array],
        layer: LayerWeights,
        call: Call,
    ) -> tuple[Array, LayerWeights]:
        """Returns (o_BLHA plus the reads, the layer's new fast weights).

        x_BKD: the states as they are projected, of memory and segment, or with rates in
        the layer only of the segment. k_BLHA: the segment's keys. left: the keys and
        values of the L oldest states, which leave the memory. No key is rotated.
        """
        assert call.writes is not None
        (written_BL, opening_BL, start_BL), L = call.writes, o_BLHA.shape[1]
        rate_BLHJ, all_BKHJ = self.find_rates(x_BKD[:, :L]), layer.rate_BMHJ
        if all_BKHJ is not None:
            all_BKHJ = jnp.concatenate([all_BKHJ, rate_BLHJ], axis=1)
            rate_BLHJ = all_BKHJ[:, :L]
        left_BLHA, v_BLHA = left
        written_BL11 = written_BL[..., None, None]
        left_BLHA = jnp.where(written_BL11, feature(left_BLHA), 0)
        left_BXHA = jnp.concatenate([layer.k_BHA[:, None], left_BLHA], axis=1)
        newest_BHA = window(left_BXHA[None], call.length_B, 1)[0, :, 0]
        read_BLHA, S_BHUA = scan_chunks(
            layer.S_BHUA,
            feature(k_BLHA),
            jnp.where(opening_BL[..., None, None], left_BLHA, left_BXHA[:, :-1]),
            v_BLHA.astype(jnp.float32),
            jnp.where(written_BL11, rate_BLHJ, 0),
            start_BL,
        )
        gate_BLH1 = nn.sigmoid(self.gate(x_BKD[:, -L:]))[..., None]
        o_BLHA += (gate_BLH1 * read_BLHA).astype(o_BLHA.dtype)
        return o_BLHA, LayerWeights(S_BHUA, newest_BHA, all_BKHJ)


def feature(k_BLHA: Array) -> Array:
    """Returns unit(silu(k)), in float32."""
    x = nn.silu(k_BLHA.astype(jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def scan_chunks(
    S_BHUA: Array,
    q_BLHA: Array,
    k_BLHA: Array,
    v_BLHU: Array,
    rate_BLHJ: Array,
    start_BL: Array,
) -> tuple[Array, Array]:
    """Returns the reads of the queries of L steps, o_BLHU, and the last S.

    A step writes after its query has read; a step with rates of 0 changes nothing. The
    steps of a chunk are products of matrices: with T_ij = b_i a_{j+1} .. a_i k_i k_j
    for j < i, their writes u solve (I + T) u = b (v - a S k).
    """
    B, L, H, _ = q_BLHA.shape
    C = min(CHUNK, L)
    P = -(-L // C)

    def cut(x_BL: Array) -> Array:
        pad = [(0, 0), (0, P * C - L), *[(0, 0)] * (x_BL.ndim - 2)]
        x_BPC = jnp.pad(x_BL, pad).reshape(B, P, C, *x_BL.shape[2:])
        x_PBC = jnp.moveaxis(x_BPC, 1, 0)
        return jnp.swapaxes(x_PBC, 2, 3) if x_BL.ndim > 3 else x_PBC

    q_PBHCA, k_PBHCA, v_PBHCU = map(cut, (q_BLHA, k_BLHA, v_BLHU))
    rate_PBHCJ, start_PBC = cut(rate_BLHJ), cut(start_BL)
    rate_PBHC1, log_a_PBHC = rate_PBHCJ[..., :1], rate_PBHCJ[..., 1]
    after_PBHC = jnp.cumsum(log_a_PBHC, axis=-1)  # S's decay by steps up to i
    before_PBHC = after_PBHC - log_a_PBHC  # by steps before i
    document_PB1C = jnp.cumsum(start_PBC, axis=-1)[:, :, None]
    same_PB1CC = document_PB1C[..., None] == document_PB1C[..., None, :]
    seen_PB1CC = same_PB1CC & jnp.tri(C, k=-1, dtype=bool)

    def masked_exp(log: Array, where: Array) -> Array:
        return jnp.exp(jnp.where(where, log, -jnp.inf))

    def with_decay(product_PBHCC: Array, end_PBHC: Array) -> Array:
        log_PBHCC = end_PBHC[..., None] - after_PBHC[..., None, :]
        return product_PBHCC * masked_exp(log_PBHCC, seen_PB1CC)

    kk_PBHCC = exact_einsum("PBHCA,PBHYA->PBHCY", k_PBHCA, k_PBHCA)
    qk_PBHCC = exact_einsum("PBHCA,PBHYA->PBHCY", q_PBHCA, k_PBHCA)
    qk_PBHCC = with_decay(qk_PBHCC, before_PBHC)
    inverse_PBHCC = invert(with_decay(kk_PBHCC, after_PBHC) * rate_PBHC1)
    is_carried_PB1C = document_PB1C == 0  # in the document of the chunk's first S
    keep_PBHC1 = masked_exp(after_PBHC, is_carried_PB1C)[..., None]
    # The solution is u - w S^T, and the queries read o + r S^T.
    u_PBHCU = exact_einsum("PBHCY,PBHYU->PBHCU", inverse_PBHCC, rate_PBHC1 * v_PBHCU)
    w_PBHCA = rate_PBHC1 * keep_PBHC1 * k_PBHCA
    w_PBHCA = exact_einsum("PBHCY,PBHYA->PBHCA", inverse_PBHCC, w_PBHCA)
    o_PBHCU = exact_einsum("PBHCY,PBHYU->PBHCU", qk_PBHCC, u_PBHCU)
    r_PBHCA = masked_exp(before_PBHC, is_carried_PB1C)[..., None] * q_PBHCA
    r_PBHCA -= exact_einsum("PBHCY,PBHYA->PBHCA", qk_PBHCC, w_PBHCA)
    # The last S has only the writes of the chunk's last document.
    last_PBHC = masked_exp(after_PBHC[..., -1:] - after_PBHC, same_PB1CC[..., -1, :])
    k_PBHCA = last_PBHC[..., None] * k_PBHCA

    def next_chunk(S_BHUA: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        u_BHCU, w_BHCA, k_BHCA, keep_BH11 = chunk
        u_BHCU -= exact_einsum("BHCA,BHUA->BHCU", w_BHCA, S_BHUA)
        added_BHUA = exact_einsum("BHCU,BHCA->BHUA", u_BHCU, k_BHCA)
        return keep_BH11 * S_BHUA + added_BHUA, S_BHUA

    chunks = u_PBHCU, w_PBHCA, k_PBHCA, keep_PBHC1[..., -1:, :]
    S_BHUA, S_PBHUA = jax.lax.scan(next_chunk, S_BHUA, chunks)
    o_PBHCU += exact_einsum("PBHCA,PBHUA->PBHCU", r_PBHCA, S_PBHUA)
    o_BPCHU = o_PBHCU.transpose(1, 0, 3, 2, 4)
    return o_BPCHU.reshape(B, P * C, H, -1)[:, :L], S_BHUA


def invert(T_PBHCC: Array) -> Array:
    """Returns (I + T)^-1 of strictly lower triangular matrices.

    Inverts diagonal blocks of 1, 2, 4, .. rows by joining pairs: as exact as
    substitution, and faster on a CPU. The last step, Newton's, takes the inverse as a
    constant and has its exact gradient.
    """
    C = T_PBHCC.shape[-1]

    def times(x_PBHCC: Array, y_PBHCC: Array) -> Array:
        return exact_einsum("PBHCX,PBHXY->PBHCY", x_PBHCC, y_PBHCC)

    inverse_PBHCC, size = jnp.broadcast_to(jnp.eye(C), T_PBHCC.shape), 1
    while size < C:
        block_C = jnp.arange(C) // size
        is_joined_CC = (block_C[:, None] == block_C + 1) & (block_C % 2 == 0)
        below_PBHCC = jnp.where(is_joined_CC, T_PBHCC, 0)
        if size > 1:
            below_PBHCC = times(inverse_PBHCC, times(below_PBHCC, inverse_PBHCC))
        inverse_PBHCC, size = inverse_PBHCC - below_PBHCC, 2 * size
    inverse_PBHCC = jax.lax.stop_gradient(inverse_PBHCC)
    rest_PBHCC = inverse_PBHCC + times(T_PBHCC, inverse_PBHCC)
    return 2 * inverse_PBHCC - times(inverse_PBHCC, rest_PBHCC)


def fast_products(config: ModelConfig, training: bool) -> float:
    """Returns the FLOPs of one layer's fast weights for a token (`model.flops`).

    Only the last step of the inverse has a backward pass.
    """
    C, H, A = CHUNK, config.n_head, config.d_head
    once = H * (6 * config.d_model + 12 * C * A + 6 * A * A + 4 * C * C)
    return (3 * once if training else once) + H * 12 * C * C
