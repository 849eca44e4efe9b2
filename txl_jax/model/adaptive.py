"""The adaptive embedding and softmax.

With cutoffs, the vocabulary is divided into clusters (Grave et al. 2017). The first
softmax predicts the most frequent tokens and one entry for each rare cluster. The
probability of a rare token is its cluster's times its own within the cluster. Rare
clusters may have smaller embeddings (Baevski and Auli 2019).

Dims: T tokens of all streams, V0, V1.. and E0, E1.. per cluster, C = V0 + G entries of
the first softmax.
"""

import functools
import itertools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from txl_jax.kernels.product import float32_product, product
from txl_jax.kernels.sharded import AXIS, REPLICATED, over_streams, stream_mesh
from txl_jax.kernels.softmax import Table, cluster_sums, scores
from txl_jax.model.config import ModelConfig
from txl_jax.model.modules import WordDropout, initial, normal

Shared = tuple[tuple[Array, ...], tuple[Array | None, ...]]  # tables, projections


class Softmax(NamedTuple):
    """The parameters of the softmax over the vocabulary.

    tables: one for all clusters, or one for each.
    projs: [Ei, D] for each cluster, or None if there is no projection.
    choice: the first softmax's entries for the rare clusters.
    """

    tables: tuple[Table, ...]
    projs: tuple[Array | None, ...]
    choice: Table | None


class EmbeddingAndSoftmax(nn.Module):
    """The embedding and the softmax, whose tables and projections may be tied.

    Logits and log-probabilities are float32 for every compute dtype.
    """

    config: ModelConfig

    def setup(self) -> None:
        """Creates the parameters; tied ones are created once."""
        config = self.config
        V, G = config.vocab_size, len(config.cutoffs)
        ends = (0, *config.cutoffs, V)
        self.bounds = [*itertools.pairwise(ends)]
        self.tables = self._make_tables("table")
        if config.div_val == 1:
            self.projs = [self._make_proj("proj", 0)] * (G + 1)
        else:
            self.projs = [self._make_proj(f"proj_{i}", i) for i in range(G + 1)]
        tied = config.tie_weights
        self.out_tables = self.tables if tied else self._make_tables("out_table")
        ties = config.tie_projs or (False,) * (G + 1)
        self.out_projs = [
            self.projs[i] if ties[i] else self._make_proj(f"out_proj_{i}", i)
            for i in range(G + 1)
        ]
        # With separate tables it is replicated, as the rare tables are.
        letters = "." if len(self.tables) > 1 else "V"
        self.bias_V: Array = self.param("bias", normal(0, letters), (V,))
        if G:
            E = config.embed_size
            rows = normal(config.norm_init_std, ".E")
            self.cluster_table_GE: Array = self.param("cluster_table", rows, (G, E))
            zeros = normal(0, ".")
            self.cluster_bias_G: Array = self.param("cluster_bias", zeros, (G,))
        self.drop_words = WordDropout(config.word_dropout)

    def _make_tables(self, name: str) -> list[Array]:
        """Returns a table [Vi, Ei] per cluster; without div_val one [V, E] for all."""
        config = self.config
        if config.div_val == 1:
            shape = (config.vocab_size, config.embed_size)
            return [self.param(name, initial(config, "VE"), shape)]
        sizes = zip(self.bounds, config.embed_sizes, strict=True)
        return [
            # Rare tables are stored whole: their sizes rarely divide over the mesh.
            self.param(
                f"{name}_{i}", initial(config, ".." if i else "VE"), (high - low, E)
            )
            for i, ((low, high), E) in enumerate(sizes)
        ]

    def _make_proj(self, name: str, i: int) -> Array | None:
        """Returns the projection [Ei, D], or None for rows of D features.

        With div_val and proj_same_dim, such rows are projected too.
        """
        config = self.config
        D, E = config.d_model, config.embed_sizes[i]
        if E == D and (config.div_val == 1 or not config.proj_same_dim):
            return None
        letters = ".D" if i else "ED"
        return self.param(name, normal(config.proj_init_std, letters), (E, D))

    def embed(self, tokens_BL: Array) -> Array:
        """Returns h_BLD: rows of the tables, projected, times sqrt(D)."""
        config = self.config
        # Sums the tables' gradients over devices, where the compiler would gather the
        # batch. On one device, this is self._rows(shared, tokens_BL).
        shared = tuple(self.tables), tuple(self.projs)
        h_BLD = over_streams(self._rows, shared, jnp.asarray(tokens_BL))
        h_BLD *= jnp.asarray(config.d_model**0.5, config.compute_dtype)
        return self.drop_words(h_BLD, tokens_BL)

    def _rows(self, shared: Shared, tokens_BL: Array) -> Array:
        """Returns rows of the tables, projected."""
        dtype = self.config.compute_dtype

        def rows_BLD(table_VE: Array, proj_ED: Array | None, index_BL: Array) -> Array:
            rows_BLE = jnp.take(table_VE, index_BL, axis=0).astype(dtype)
            if proj_ED is None:
                return rows_BLE
            return product("BLE,ED->BLD", rows_BLE, proj_ED.astype(dtype))

        tables, projs = shared
        if len(tables) == 1:
            return rows_BLD(tables[0], projs[0], tokens_BL)
        h_BLD = jnp.zeros((), dtype)
        clusters = zip(self.bounds, tables, projs, strict=True)
        for (low, high), table_VE, proj_ED in clusters:
            index_BL = jnp.clip(tokens_BL - low, 0, high - low - 1)
            inside_BL = (low <= tokens_BL) & (tokens_BL < high)
            own_BLD = rows_BLD(table_VE, proj_ED, index_BL)
            h_BLD = jnp.where(inside_BL[..., None], own_BLD, h_BLD)
        return h_BLD

    def _scores(self, hidden_BLD: Array, i: int) -> Array:
        """Returns the unnormalized logits of cluster i; BLC for the first."""
        dtype = hidden_BLD.dtype
        low, high = self.bounds[i]
        if self.config.div_val == 1:
            table_VE = self.out_tables[0][low:high]
        else:
            table_VE = self.out_tables[i]
        bias_V = self.bias_V[low:high]
        if i == 0 and len(self.bounds) > 1:
            table_VE = jnp.concatenate([table_VE, self.cluster_table_GE])
            bias_V = jnp.concatenate([bias_V, self.cluster_bias_G])
        hidden_BLE = hidden_BLD
        if (proj_ED := self.out_projs[i]) is not None:
            hidden_BLE = product("BLD,ED->BLE", hidden_BLD, proj_ED.astype(dtype))
        score_BLV = float32_product("BLE,VE->BLV", hidden_BLE, table_VE.astype(dtype))
        return score_BLV + bias_V

    def log_probs(self, hidden_BLD: Array) -> Array:
        """Returns the log-probability of every token, [B, L, V] in nats."""
        first_BLC = jax.nn.log_softmax(self._scores(hidden_BLD, 0))
        V0 = self.bounds[0][1]
        parts = [first_BLC[..., :V0]]
        for i in range(1, len(self.bounds)):
            own_BLV = jax.nn.log_softmax(self._scores(hidden_BLD, i))
            parts.append(first_BLC[..., V0 + i - 1, None] + own_BLV)
        return jnp.concatenate(parts, axis=-1)

    def nll(self, hidden_BLD: Array, targets_BL: Array) -> Array:
        """Returns -log p(target), nll_BL in nats, in token order.

        A rare cluster is scored for its own tokens only. On a mesh each device
        scores its own streams. The tables' rows are sharded if all tables divide over
        the mesh axis of the vocabulary.
        """
        dtype, bias_V = hidden_BLD.dtype, self.bias_V
        biases = [bias_V]
        if len(self.out_tables) > 1:
            biases = [bias_V[low:high] for low, high in self.bounds]
        choice = None
        if self.config.cutoffs:
            choice = Table(self.cluster_table_GE, self.cluster_bias_G)
        params = Softmax(
            tuple(map(Table, self.out_tables, biases)),
            tuple(None if x is None else x.astype(dtype) for x in self.out_projs),
            choice,
        )
        mesh, axis = stream_mesh(hidden_BLD), AXIS["V"]
        parts = 1 if mesh is None else mesh.shape[axis]
        if parts == 1 or any(len(bias_V) % parts for bias_V in biases):
            axis = None
        specs: Any = Softmax(PartitionSpec(axis), REPLICATED, REPLICATED)  # type: ignore[arg-type]
        ends = (0, *(high for _, high in self.bounds))
        local = functools.partial(nll_of_streams, ends, axis)
        targets_BL = jnp.asarray(targets_BL)
        return over_streams(local, params, hidden_BLD, targets_BL, specs=specs)


def nll_of_streams(
    ends: tuple[int, ...],
    axis: str | None,
    params: Softmax,
    hidden_BLD: Array,
    targets_BL: Array,
) -> Array:
    """Returns nll_BL of the streams of one device.

    ends: the boundaries of the clusters. axis: the mesh axis over which the rows of the
    tables are sharded.
    """
    hidden_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    target_T = targets_BL.reshape(-1)
    if params.choice is not None:
        order_T = jnp.argsort(target_T)
        hidden_TD, target_T = hidden_TD[order_T], target_T[order_T]
    hidden = tuple(
        hidden_TD if proj_ED is None else product("TD,ED->TE", hidden_TD, proj_ED)
        for proj_ED in params.projs
    )
    sums = cluster_sums(ends, axis, hidden, target_T, params.tables)
    lse_T, score_T = sums[0]  # score_T is 0 for the targets of rare clusters
    if params.choice is None:
        return (lse_T - score_T).reshape(targets_BL.shape)
    # All tokens need the first softmax, which also predicts the cluster.
    choice_TG = scores(hidden_TD.dtype, hidden[0], params.choice)
    lse_T = jnp.logaddexp(lse_T, jax.nn.logsumexp(choice_TG, axis=1))
    nll_T = lse_T - score_T
    for i, (low, high) in enumerate(itertools.pairwise(ends[1:])):
        lse_T, score_T = sums[i + 1]
        rare_T = lse_T - score_T - choice_TG[:, i]
        nll_T += jnp.where((low <= target_T) & (target_T < high), rare_T, 0)
    nll_T = jnp.zeros_like(nll_T).at[order_T].set(nll_T, unique_indices=True)
    return nll_T.reshape(targets_BL.shape)
