"""The layout of fixed parameters that XLA:CPU reads fastest for one token.

Training scans over stacked layers. Slicing stacked parameters copies them, which would
take most of the time of a one-token step. Here every layer has separate parameters.
W_q, W_k and W_v are one matrix, qkv_DJHA; W_o is two halves, o_PHAC, which are computed
on two cores; the feed-forward's second matrix is [D, F]. Modules recognize the layout
by the names of these parameters.

Dims: J = 3 of q, k and v, P = 2 parts of C = D / 2 columns, X = H A, Y tokens.
"""

import jax
import jax.numpy as jnp
from jax import Array

from txl_jax.model.initializers import Params


def unstack(params: Params) -> Params:
    """Lays out the parameters of a `TransformerXL`; call it outside the loop."""

    def lay_out(layer: Params) -> Params:
        attention, feed_forward = dict(layer["attention"]), dict(layer["feed_forward"])
        qkv_JHAD = jnp.stack([attention.pop(name) for name in "qkv"])
        attention["qkv"] = jnp.moveaxis(qkv_JHAD, -1, 0)
        attention["o_halves"] = jnp.stack(jnp.split(attention.pop("o"), 2, axis=-1))
        out = feed_forward.pop("out")
        feed_forward["out_DF"] = {"kernel": out["kernel"].T, "bias": out["bias"]}
        return layer | {"attention": attention, "feed_forward": feed_forward}

    layers = params["layers"]
    N = jax.tree.leaves(layers)[0].shape[0]
    separate = {
        f"layers_{n}": lay_out(jax.tree.map(lambda leaf, n=n: leaf[n], layers))
        for n in range(N)
    }
    return {name: leaf for name, leaf in params.items() if name != "layers"} | separate


def project_all(x_BYD: Array, qkv_DJHA: Array) -> tuple[Array, Array, Array]:
    """Returns queries, keys and values."""
    qkv_BYJHA = jnp.einsum("BYD,DJHA->BYJHA", x_BYD, qkv_DJHA)
    return qkv_BYJHA[:, :, 0], qkv_BYJHA[:, :, 1], qkv_BYJHA[:, :, 2]


def join_heads(o_BLHA: Array, o_PHAC: Array) -> Array:
    """Returns the attention's output, out_BLD."""
    # With two contracted dimensions, XLA:CPU would transpose the weights first, which
    # takes as long as the product.
    P, H, A, C = o_PHAC.shape
    B, L = o_BLHA.shape[:2]
    o_PBLX = jnp.broadcast_to(o_BLHA.reshape(B, L, H * A), (P, B, L, H * A))
    o_PXC = o_PHAC.reshape(P, H * A, C)
    return jnp.einsum("PBLX,PXC->BLPC", o_PBLX, o_PXC).reshape(B, L, P * C)
