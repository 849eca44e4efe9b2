"""The sizes and choices that make a Transformer-XL, under the paper's names."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from txl_jax.errors import UserError, require, require_one_of

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
POSITIONS = (
    "transformer_xl",  # section 3.3
    "shaw",  # Shaw et al. 2018: learned distances, as in the paper's ablation
    "shaw_biased",  # the same with the reference code's u and a bias per distance
    "sinusoidal",  # Vaswani et al. 2017: absolute, added to the embeddings
    "learned",  # Al-Rfou et al. 2018: absolute, added to each layer's input
    "none",
    "sinusoidal_repeated",  # sinusoidal with memory: section 3.3's temporal confusion
)
ABSOLUTE = ("sinusoidal", "learned")
WITH_TABLE = ("shaw", "shaw_biased", "learned")
INITIAL_MEMORIES = ("empty", "zeros")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Transformer-XL; the defaults are the paper's 12 layers for enwik8 (Table 2)."""

    vocab_size: int = 0  # 0 = as many as the corpus's vocabulary has
    n_layer: int = 12  # layers
    d_model: int = 512  # features of a token between layers
    d_embed: int = 0  # of an embedding, projected to d_model; 0 = d_model
    n_head: int = 8  # heads of the attention
    d_head: int = 64  # features of a head
    d_inner: int = 2048  # the feed-forward's hidden size
    # The vocabulary's two ends (Grave et al. 2017; Baevski and Auli 2019).
    cutoffs: tuple[int, ...] = ()  # the first id of each cluster but the frequent one
    div_val: int = 1  # cluster i has embeddings of d_embed // div_val^i
    tie_weights: bool = True  # the softmax scores with the embedding's tables
    tie_projs: tuple[bool, ...] = ()  # and its projections, per cluster; () = none
    proj_same_dim: bool = True  # with div_val, project also from d_model to d_model
    # Positions and memory.
    position: str = "transformer_xl"  # one of POSITIONS
    n_position: int = 0  # learned distances (shaw) or places (learned)
    untie_r: bool = False  # each layer has its own u and w
    mem_len: int = 512  # tokens remembered while training
    initial_memory: str = "empty"  # or "zeros", which all tokens see
    clamp_len: int = 0  # distances beyond it count as it; 0 = off
    same_length: bool = False  # every query sees the newest mem_len keys alone
    same_length_self: bool = False  # and its own key besides
    pre_lnorm: bool = False  # normalise before each sublayer instead of after
    layer_norm_epsilon: float = 1e-5  # added to the variance that a norm divides by
    # Regularisation.
    dropout: float = 0.1  # of embeddings, positions and what sublayers give
    dropatt: float = 0.0  # dropout of the attention's probabilities
    variational: bool = False  # dropout has one mask for all tokens of a segment
    word_dropout: float = 0.0  # dropout of whole words from the embedding
    # Initialisation.
    init_std: float = 0.02  # of every weight, u and w
    init_range: float = 0.0  # above 0: weights are uniform within it instead
    proj_init_std: float = 0.01  # of the projections of embeddings
    norm_init_std: float = 0.0  # of the norms' scales, around 1
    cluster_init_std: float = 0.0  # of the softmax's rows for its clusters
    # Computation.
    dtype: str = "float32"  # of the computation; parameters and loss are float32
    mem_dtype: str = "compute"  # of the memory; "compute" = as dtype
    kernel: str = "auto"  # of the attention; "auto" = the fastest for the device
    remat: bool = False  # recompute a layer in the backward pass, to save memory
    unroll: int = 1  # layers per turn of the scan over layers; n_layer = all

    def __post_init__(self) -> None:
        """Refuses impossible sizes and combinations, naming the fields."""
        sizes = ("n_layer", "d_model", "n_head", "d_head", "d_inner", "unroll")
        require(self, "model", 1, *sizes, "div_val")
        zero_is_off = ("mem_len", "clamp_len", "d_embed", "n_position", "init_range")
        stds = ("proj_init_std", "norm_init_std", "cluster_init_std")
        require(self, "model", 0, "vocab_size", *zero_is_off, *stds)
        for name in ("dropout", "dropatt", "word_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name} must be in [0, 1)")
        for name in ("init_std", "layer_norm_epsilon"):
            if not getattr(self, name) > 0:
                raise UserError(f"model.{name} must be above 0")
        require_one_of(self.dtype, list(DTYPES), "model.dtype")
        require_one_of(self.mem_dtype, ["compute", *DTYPES], "model.mem_dtype")
        initial = list(INITIAL_MEMORIES)
        require_one_of(self.initial_memory, initial, "model.initial_memory")
        self._check_clusters()
        self._check_position()

    def _check_clusters(self) -> None:
        ends = (0, *self.cutoffs, self.vocab_size or 2**62)
        if any(low >= high for low, high in zip(ends, ends[1:], strict=False)):
            size = f" and below the vocabulary's {self.vocab_size}"
            raise UserError(
                f"model.cutoffs = {self.cutoffs} must be above 0, rising"
                f"{size if self.vocab_size else ''}"
            )
        if not self.embed_sizes[-1]:
            raise UserError(
                f"model.div_val = {self.div_val} leaves the embeddings of the last of "
                f"{len(self.embed_sizes)} clusters no features: lower it"
            )
        if self.tie_projs and len(self.tie_projs) != len(self.embed_sizes):
            raise UserError(
                f"model.tie_projs = {self.tie_projs} must say true or false for each "
                f"of the {len(self.embed_sizes)} clusters, or be empty"
            )

    def _check_position(self) -> None:
        require_one_of(self.position, list(POSITIONS), "model.position")
        if self.d_model % 2:
            raise UserError(
                f"model.d_model = {self.d_model} must be even: half of a position's "
                "features are sines, half are cosines"
            )
        if self.position in ABSOLUTE and self.mem_len:
            raise UserError(
                f'model.position = "{self.position}" with a memory of mem_len = '
                f"{self.mem_len} gives two tokens one position: set mem_len to 0, or "
                "use a relative position"
            )
        if (self.position in WITH_TABLE) != (self.n_position > 0):
            raise UserError(
                f'model.position = "{self.position}" with n_position = '
                f"{self.n_position}: {', '.join(WITH_TABLE)} need a table of "
                "n_position rows, the others have none"
            )
        if self.untie_r and self.position != "transformer_xl":
            raise UserError(
                f'model.untie_r has no meaning for model.position = "{self.position}"'
            )
        if self.same_length and not self.mem_len and not self.same_length_self:
            raise UserError(
                "same_length shows each token the newest mem_len keys: with mem_len = "
                "0 there are none; set mem_len, or same_length=false"
            )

    @property
    def embed_size(self) -> int:
        """E, of the frequent cluster's embeddings."""
        return self.d_embed or self.d_model

    @property
    def embed_sizes(self) -> list[int]:
        """E of each cluster, G + 1 of them."""
        return [
            self.embed_size // self.div_val**g for g in range(len(self.cutoffs) + 1)
        ]

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of activations."""
        return jnp.dtype(DTYPES[self.dtype])

    @property
    def memory_dtype(self) -> jnp.dtype:
        """The dtype of the memory between segments."""
        name = self.dtype if self.mem_dtype == "compute" else self.mem_dtype
        return jnp.dtype(DTYPES[name])


# What the code bases of published models chose differently, beside their sizes.


def pytorch(**fields: Any) -> ModelConfig:
    """Returns a model as the paper's PyTorch code makes it."""
    std = fields.get("init_std", ModelConfig.init_std)
    family: dict[str, Any] = {"norm_init_std": std, "cluster_init_std": std}
    return ModelConfig(**family | fields)


def nvidia(**fields: Any) -> ModelConfig:
    """Returns a model as NVIDIA's PyTorch code makes it."""
    family: dict[str, Any] = {"same_length_self": True}
    return pytorch(**family | fields)


def huggingface(**fields: Any) -> ModelConfig:
    """Returns a model as Hugging Face's port makes it."""
    family: dict[str, Any] = {"initial_memory": "zeros", "untie_r": True}
    return pytorch(**family | fields)


def tensorflow(**fields: Any) -> ModelConfig:
    """Returns a model as the paper's TensorFlow code makes it."""
    family: dict[str, Any] = {
        "layer_norm_epsilon": 1e-12,
        "initial_memory": "zeros",
        "same_length_self": True,
    }
    return ModelConfig(**family | fields)
