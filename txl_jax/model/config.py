"""The sizes and choices that make a Transformer-XL, under the paper's names."""

import dataclasses

import jax.numpy as jnp

from txl_jax.errors import UserError, require, require_one_of

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Transformer-XL; the defaults are the paper's 12 layers for enwik8 (Table 2)."""

    vocab_size: int = 0  # 0 = as many as the corpus's vocabulary has
    n_layer: int = 12
    d_model: int = 512
    n_head: int = 8
    d_head: int = 64
    d_inner: int = 2048  # the feed-forward's hidden size
    mem_len: int = 512  # tokens remembered while training
    clamp_len: int = 0  # distances beyond it count as it; 0 = off
    same_length: bool = False  # every query sees the newest mem_len keys alone
    pre_lnorm: bool = False  # normalise before each sublayer instead of after
    dropout: float = 0.1
    dropatt: float = 0.0  # dropout of the attention's probabilities
    init_std: float = 0.02  # of every weight, u and w
    dtype: str = "float32"  # of the computation; parameters and loss are float32
    mem_dtype: str = "compute"  # of the memory; "compute" = as dtype
    kernel: str = "xla"  # of the attention
    remat: bool = False  # recompute a layer in the backward pass, to save memory
    unroll: int = 1  # layers per turn of the scan over layers; n_layer = all

    def __post_init__(self) -> None:
        """Refuses impossible sizes, naming the field."""
        sizes = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "unroll")
        require(self, "model", 1, *sizes)
        require(self, "model", 0, "vocab_size", "mem_len", "clamp_len")
        for name in ("dropout", "dropatt"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name} must be in [0, 1)")
        if not self.init_std > 0:
            raise UserError("model.init_std must be above 0")
        if self.d_model % 2:
            raise UserError(
                f"model.d_model = {self.d_model} must be even: half of a position's "
                "features are sines, half are cosines"
            )
        if self.same_length and not self.mem_len:
            raise UserError(
                "same_length shows each token the newest mem_len keys: with mem_len = "
                "0 there are none; set mem_len, or same_length=false"
            )
        require_one_of(self.dtype, list(DTYPES), "model.dtype")
        require_one_of(self.mem_dtype, ["compute", *DTYPES], "model.mem_dtype")

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return jnp.dtype(DTYPES[self.dtype])

    @property
    def memory_dtype(self) -> jnp.dtype:
        """The dtype of the memory between segments."""
        name = self.dtype if self.mem_dtype == "compute" else self.mem_dtype
        return jnp.dtype(DTYPES[name])
