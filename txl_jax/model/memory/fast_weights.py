"""Fast weights, which take up every state that leaves the memory (gated delta rule).

Beside the paper's memory, each head of each layer has a matrix S from keys to values. A
state that becomes older than the M tokens before a query changes S by the gated delta
rule (Yang et al. 2024, Gated DeltaNet); the query reads S. With the keys of [memory;
segment] numbered from 0, query i attends to keys up to i + M and reads the matrix S_i
of all keys before i, which therefore does not depend on where segments begin:

    k_j = unit(silu(W_k x_{j-1}))    q_i = unit(silu(W_k x_{i+M}))    v_j = W_v x_j
    b_j = sigmoid(w_b x_j)           a_j = sigmoid(w_a x_j)
    S_{j+1} = a_j S_j + b_j (v_j - a_j S_j k_j) k_j^T
    o_i <- o_i + sigmoid(w_g x_{i+M}) S_i q_i

A value is stored under the key of the state before it, so that S answers what followed
the last state like the query's. W_k and W_v are those of the attention, with `k_norm`
if there is one, before any rotation; since W_k also makes the queries, reads train it
without gradients across segments. S is float32, and a constant where a call begins.

Dims: C steps of a chunk, P chunks, U values (as many as A, which are keys here), K = M
+ L keys, J = 2: b and the logarithm of a.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.kernels.operands import Kernel, Operands
from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params, feature_norm, normal, weight
from txl_jax.model.memory.cache import CacheLayer, Memory
from txl_jax.model.memory.interval import find_oldest, window
from txl_jax.model.memory.key_values import KeyValueMemory, KeyValues
from txl_jax.model.memory.protocol import Kept, LayerMemory, MemoryLike
from txl_jax.model.memory.ring import RingLayer

CHUNK = 16
# The initial logits of b, a and the gate: half of a value is written, S forgets 0.5 %
# with each state, and what a query reads is multiplied by 0.12.
BIASES = (0.0, 5.3, -2.0)
# The default may round factors to bfloat16 or TF32.
product = functools.partial(jnp.einsum, precision="highest")


@flax.struct.dataclass
class FastMemory:
    """A local memory, and the fast weights of all older states of the document.

    S_NBHUA, k_NBHA: the matrices, and the newest key that has left (float32).
    rate_NBMHJ: those of the local memory's states, if it has only keys and values.
    """

    local: Any  # a MemoryLike
    S_NBHUA: Array
    k_NBHA: Array
    rate_NBMHJ: Array | None

    @classmethod
    def of(
        cls, config: ModelConfig, local: MemoryLike, rate_NBMHJ: Array | None = None
    ) -> "FastMemory":
        """Returns a local memory, and fast weights that have seen nothing."""
        N, B = config.n_layer, len(local.filled_B)
        H, A = config.n_head, config.d_head
        if rate_NBMHJ is None and not isinstance(local, Memory):
            rate_NBMHJ = jnp.zeros((N, B, local.mem_len, H, 2), jnp.float32)
        S_NBHUA = jnp.zeros((N, B, H, A, A), jnp.float32)
        return cls(local, S_NBHUA, jnp.zeros((N, B, H, A), jnp.float32), rate_NBMHJ)

    @property
    def mem_len(self) -> int:
        """The length M of the local memory."""
        return self.local.mem_len

    @property
    def filled_B(self) -> Array:
        """The visible slots of the local memory."""
        return self.local.filled_B

    def with_key_values(
        self, config: ModelConfig, params: Params, tgt_len: int
    ) -> "FastMemory":
        """Returns the memory with keys and values for calls of tgt_len tokens.

        `params` are laid out (`key_values.unstack`).
        """
        if not isinstance(self.local, Memory):
            return self

        def rates_of(n: int, h_BMD: Array) -> Array:
            own = params[f"layers_{n}"]["attention"]
            if config.pre_lnorm:
                h_BMD = feature_norm(config).apply({"params": own["norm"]}, h_BMD)
            fast: Any = FastWeights(config)
            return fast.apply({"params": own["fast"]}, h_BMD, method="find_rates")

        rates = [rates_of(n, h_BMD) for n, h_BMD in enumerate(self.local.h_NBMD)]
        local = KeyValueMemory.of(config, params, self.local, tgt_len)
        return dataclasses.replace(self, local=local, rate_NBMHJ=jnp.stack(rates))

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> "FastMemory":
        """Returns the memory after a call; `kept` is of all layers."""
        rate_NBMHJ = self.rate_NBMHJ
        if isinstance(self.local, Memory):
            kept, state = kept
        else:
            kept, states = zip(*kept, strict=True)
            state = jax.tree.map(lambda *x: jnp.stack(x), *states)
        if rate_NBMHJ is not None:
            K, M = state.rate_BKHJ.shape[2], self.mem_len
            end_B = jnp.full_like(self.filled_B, K - M)
            end_B = end_B if length_B is None else length_B
            rate_NBMHJ = window(state.rate_BKHJ, end_B, M)
        local = self.local.append(kept, length_B, first_BL)
        S_NBHUA, k_NBHA = jax.lax.stop_gradient((state.S_BHUA, state.k_BHA))
        return FastMemory(local, S_NBHUA, k_NBHA, rate_NBMHJ)


class OpenFast(NamedTuple):
    """A `FastMemory` during a call; for the other fields, see `FastLayer`."""

    memory: FastMemory
    written_BL: Array
    start_BL: Array
    length_B: Array

    @property
    def layers(self) -> Any:
        """The local memory's layers, with their fast weights."""
        memory, call = self.memory, (self.written_BL, self.start_BL, self.length_B)
        S_NBHUA, k_NBHA = jax.lax.stop_gradient((memory.S_NBHUA, memory.k_NBHA))
        layers, rate_NBMHJ, N = memory.local.layers, memory.rate_NBMHJ, len(S_NBHUA)
        if rate_NBMHJ is None:
            of_all = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), call)
            return FastLayer(layers, S_NBHUA, k_NBHA, None, *of_all)
        each = zip(layers, S_NBHUA, k_NBHA, rate_NBMHJ, strict=True)
        return tuple(FastLayer(*own, *call) for own in each)

    def append(
        self, kept: Kept, length_B: Array | None, first_BL: Array | None
    ) -> FastMemory:
        """Returns the memory after the call."""
        return self.memory.append(kept, length_B, first_BL)


class FastState(NamedTuple):
    """What a layer keeps beside the local memory; rate_BKHJ as in `FastMemory`."""

    S_BHUA: Array
    k_BHA: Array
    rate_BKHJ: Array | None


class FastLayer(NamedTuple):
    """A layer of the local memory, and its fast weights.

    written_BL: whether key j, which leaves between the queries j and j + 1, belongs to
        their document; neither an empty slot nor a state of an older document does.
    start_BL: where a document starts, whose queries read an empty S.
    length_B: the number of real tokens, and of keys that leave.
    """

    local: LayerMemory
    S_BHUA: Array
    k_BHA: Array
    rate_BMHJ: Array | None
    written_BL: Array
    start_BL: Array
    length_B: Array

    def before(self, h_BLD: Array) -> tuple[Array, int] | None:
        """Returns the states of the local memory."""
        return self.local.before(h_BLD)

    def attend(self, own: Operands, h_BKD: Array, kernel: Kernel) -> tuple[Array, Kept]:
        """Returns the local memory's result, to which `FastWeights` adds."""
        return self.local.attend(own, h_BKD, kernel)

    def leaving(self, own: Operands, kept: Kept) -> tuple[Array, Array]:
        """Returns the keys and values of the L oldest states, which leave the memory.

        own: as for `attend`, which keeps `kept`.
        """
        L, local = own.q_BLHA.shape[1], self.local
        if isinstance(local, CacheLayer):
            return own.k_BKHA[:, :L], own.v_BKHA[:, :L]
        if isinstance(local, KeyValues):
            k_BKHA, v_BKHA = kept
            return k_BKHA[:, :L], v_BKHA[:, :L]
        assert isinstance(local, RingLayer)
        slot = (local.slot - local.mem_len) % kept.k_BHAM.shape[3]

        def take(x_BHAM: Array) -> Array:
            x_BHA1 = jax.lax.dynamic_slice_in_dim(x_BHAM, slot, 1, axis=3)
            return jnp.moveaxis(x_BHA1, 3, 1)

        k_B1HA, v_B1HA = take(kept.k_BHAM), take(kept.v_BHAM)
        if local.rotate is not None:
            k_B1HA = local.rotate(k_B1HA, -slot[None])
        return k_B1HA, v_B1HA


class FastWeights(nn.Module):
    """Reads and writes the fast weights of one layer."""

    config: ModelConfig

    def setup(self) -> None:
        """Creates w_b, w_a and w_g, with biases."""

        def dense(bias: float) -> nn.Dense:
            return nn.Dense(
                self.config.n_head,
                dtype=jnp.float32,
                kernel_init=weight(self.config, "DH"),
                bias_init=normal(0, "H", mean=bias),
            )

        self.write, self.decay, self.gate = map(dense, BIASES)

    def find_rates(self, x_BKD: Array) -> Array:
        """Returns b and log a of states, rate_BKHJ."""
        write_BKH, decay_BKH = self.write(x_BKD), self.decay(x_BKD)
        return jnp.stack([nn.sigmoid(write_BKH), nn.log_sigmoid(decay_BKH)], axis=-1)

    def __call__(
        self, o_BLHA: Array, kept: Kept, own: Operands, x_BKD: Array, layer: Any
    ) -> tuple[Array, tuple[Kept, FastState]]:
        """Returns (o_BLHA with what is read, (kept, what the fast weights keep)).

        layer: a FastLayer, whose `attend` has read `own` and returned o_BLHA and kept.
        x_BKD: the states that are projected, of memory and segment, or of the segment
        if the memory holds keys and values.
        """
        L = o_BLHA.shape[1]
        rate_BKHJ = None
        if layer.rate_BMHJ is None:
            rate_BLHJ = self.find_rates(x_BKD[:, :L])
        else:
            rate_BKHJ = jnp.concatenate(
                [layer.rate_BMHJ, self.find_rates(x_BKD)], axis=1
            )
            rate_BLHJ = rate_BKHJ[:, :L]
        k_BLHA, v_BLHA = layer.leaving(own, kept)
        written_BL11 = layer.written_BL[..., None, None]
        left_BLHA = jnp.where(written_BL11, feature(k_BLHA), 0)
        left_BKHA = jnp.concatenate([layer.k_BHA[:, None], left_BLHA], axis=1)
        newest_BHA = jax.vmap(lambda k_KHA, at: k_KHA[at])(left_BKHA, layer.length_B)
        steps = Steps(
            feature(own.k_BKHA[:, -L:]),
            left_BKHA[:, :-1],
            v_BLHA.astype(jnp.float32),
            jnp.where(written_BL11, rate_BLHJ, 0),
            layer.start_BL,
        )
        read_BLHA, S_BHUA = run(layer.S_BHUA, steps)
        gate_BLH1 = nn.sigmoid(self.gate(x_BKD[:, -L:]))[..., None]
        o_BLHA += (gate_BLH1 * read_BLHA).astype(o_BLHA.dtype)
        return o_BLHA, (kept, FastState(S_BHUA, newest_BHA, rate_BKHJ))


def feature(k_BLHA: Array) -> Array:
    """Returns unit(silu(k)), in float32."""
    x = nn.silu(k_BLHA.astype(jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class Steps(NamedTuple):
    """The queries of L steps, and what each writes after its query has read.

    A step with rates of 0 changes nothing. start_BL: see `FastLayer`.
    """

    q_BLHA: Array
    k_BLHA: Array
    v_BLHA: Array
    rate_BLHJ: Array
    start_BL: Array


def run(S_BHUA: Array, steps: Steps) -> tuple[Array, Array]:
    """Returns what the steps' queries read, o_BLHU, and the last S.

    The steps of a chunk are products of matrices: with T_ij = b_i a_{j+1} .. a_i k_i
    k_j, j < i, what they write solves (I + T) u = b (v - a S k). Only S passes from
    chunk to chunk. Chunks of 64 steps would take longer on a CPU.
    """
    B, L, H, _ = steps.q_BLHA.shape
    C = min(CHUNK, L)
    P = -(-L // C)

    def cut(x_BL: Array) -> Array:
        pad = [(0, 0), (0, P * C - L), *[(0, 0)] * (x_BL.ndim - 2)]
        x_BPC = jnp.pad(x_BL, pad).reshape(B, P, C, *x_BL.shape[2:])
        x_PBC = jnp.moveaxis(x_BPC, 1, 0)
        return jnp.swapaxes(x_PBC, 2, 3) if x_BL.ndim > 3 else x_PBC

    q_PBHCA, k_PBHCA, v_PBHCU, rate_PBHCJ, start_PBC = map(cut, steps)
    rate_PBHC, log_a_PBHC = rate_PBHCJ[..., 0], rate_PBHCJ[..., 1]
    after_PBHC = jnp.cumsum(log_a_PBHC, axis=-1)  # decay from the chunk's S to step i
    before_PBHC = after_PBHC - log_a_PBHC
    document_PB1C = jnp.cumsum(start_PBC, axis=-1)[:, :, None]
    is_first_PB1C = document_PB1C == 0  # reads the chunk's S
    earlier_CC = jnp.tri(C, k=-1, dtype=bool)
    same_PB1CC = document_PB1C[..., None] == document_PB1C[..., None, :]
    seen_PB1CC = earlier_CC & same_PB1CC

    def decayed(end_PBHC: Array) -> Array:
        log_PBHCC = end_PBHC[..., None] - after_PBHC[..., None, :]
        return jnp.where(seen_PB1CC, jnp.exp(jnp.where(seen_PB1CC, log_PBHCC, 0)), 0)

    kk_PBHCC = product("PBHCA,PBHYA->PBHCY", k_PBHCA, k_PBHCA)
    qk_PBHCC = product("PBHCA,PBHYA->PBHCY", q_PBHCA, k_PBHCA) * decayed(before_PBHC)
    T_PBHCC = rate_PBHC[..., None] * decayed(after_PBHC) * kk_PBHCC
    from_S_PBHC = jnp.where(is_first_PB1C, jnp.exp(after_PBHC), 0)
    # The solution is u - w S^T, and what the queries read o + r S^T.
    wk_PBHCA = (rate_PBHC * from_S_PBHC)[..., None] * k_PBHCA
    wv_PBHCU = rate_PBHC[..., None] * v_PBHCU
    inverse_PBHCC = invert(T_PBHCC)
    w_PBHCA = product("PBHCY,PBHYA->PBHCA", inverse_PBHCC, wk_PBHCA)
    u_PBHCU = product("PBHCY,PBHYU->PBHCU", inverse_PBHCC, wv_PBHCU)
    o_PBHCU = product("PBHCY,PBHYU->PBHCU", qk_PBHCC, u_PBHCU)
    r_PBHCA = jnp.where(is_first_PB1C, jnp.exp(before_PBHC), 0)[..., None] * q_PBHCA
    r_PBHCA -= product("PBHCY,PBHYA->PBHCA", qk_PBHCC, w_PBHCA)
    # Of a chunk's writes, the last S holds those of its last document.
    is_last_PB1C = document_PB1C == document_PB1C[..., -1:]
    left_PBHC = jnp.where(is_last_PB1C, jnp.exp(after_PBHC[..., -1:] - after_PBHC), 0)
    k_PBHCA = left_PBHC[..., None] * k_PBHCA

    def write(S_BHUA: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        u_BHCU, w_BHCA, k_BHCA, keep_BH = chunk
        u_BHCU -= product("BHCA,BHUA->BHCU", w_BHCA, S_BHUA)
        added_BHUA = product("BHCU,BHCA->BHUA", u_BHCU, k_BHCA)
        return keep_BH[..., None, None] * S_BHUA + added_BHUA, S_BHUA

    chunks = u_PBHCU, w_PBHCA, k_PBHCA, from_S_PBHC[..., -1]
    if P > 1:
        S_BHUA, S_PBHUA = jax.lax.scan(write, S_BHUA, chunks)
    else:
        S_PBHUA = S_BHUA[None]
        S_BHUA, _ = write(S_BHUA, tuple(x[0] for x in chunks))
    o_PBHCU += product("PBHCA,PBHUA->PBHCU", r_PBHCA, S_PBHUA)
    o_BPCHU = o_PBHCU.transpose(1, 0, 3, 2, 4)
    return o_BPCHU.reshape(B, P * C, H, -1)[:, :L], S_BHUA


def invert(T_PBHCC: Array) -> Array:
    """Returns (I + T)^-1 of strictly lower triangular matrices.

    It joins the inverses of diagonal blocks of 1, 2, 4, .. rows, which is as exact as
    substitution, whereas powers of T grow with C. The last step, Newton's, has the
    gradient of the inverse.
    """
    C = T_PBHCC.shape[-1]

    def times(x_PBHCC: Array, y_PBHCC: Array) -> Array:
        return product("PBHCX,PBHXY->PBHCY", x_PBHCC, y_PBHCC)

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


def open_fast(
    memory: MemoryLike, L: int, first_BL: Array | None, length_B: Array | None
) -> OpenFast:
    """Returns the memory for a call of L tokens."""
    assert isinstance(memory, FastMemory), "use kinds.empty_memory"
    filled_B, M, step_L = memory.filled_B, memory.mem_len, jnp.arange(L)
    if length_B is None:
        length_B = jnp.full_like(filled_B, L)
    if first_BL is None:
        first_BL = jnp.zeros((len(filled_B), L), bool)
    is_real_BL = step_L < length_B[:, None]
    oldest_BL = find_oldest(filled_B, first_BL, M, L, reach=0)
    written_BL = is_real_BL & (step_L >= oldest_BL)
    return OpenFast(memory, written_BL, first_BL & is_real_BL, length_B)


def fast_products(config: ModelConfig, training: bool) -> float:
    """Returns the FLOPs of one layer's fast weights for a token (`model.flops`).

    The inverse has no backward pass, except for its last step.
    """
    C, H, A = CHUNK, config.n_head, config.d_head
    once = 2 * config.d_model * 3 * H + H * (12 * C * A + 6 * A * A + 4 * C * C)
    inverse = H * 12 * C * C
    return (3 * once if training else once) + inverse
