"""The sizes and variants of a Transformer-XL, under the paper's names."""

import dataclasses
from typing import Any

from txl_jax.errors import UserError
from txl_jax.fields import TRAINING, at_least, check, field, fraction, one_of, positive
from txl_jax.model.memory_fields import ABSOLUTE_POSITIONS, MemoryFields
from txl_jax.model.remat import parse_remat

# Kernels of the attention; "auto" = the fastest for the device.
KERNELS = ("auto", "xla", "chunked", "tpu")
POSITIONS = (
    "transformer_xl",  # section 3.3
    "shaw",  # Shaw et al. 2018: learned distances, as in the paper's ablation
    "shaw_biased",  # the same with the reference code's u and a bias per distance
    "sinusoidal",  # Vaswani et al. 2017: absolute, added to the embeddings
    "learned",  # Al-Rfou et al. 2018: absolute, added to each layer's input
    "rotary",  # Su et al. 2021: queries and keys are rotated by their positions
    "alibi",  # Press et al. 2022: scores fall linearly with distance
    "t5",  # Raffel et al. 2020: a bias for each bucket of distances
    "none",
)
LEARNED_POSITIONS = ("shaw", "shaw_biased", "learned")
RECURRENCES = ("below", "same")  # section 3.2; Ding et al. 2021 for "same"
NORMS = ("layer", "rms")  # Zhang and Sennrich 2019 for "rms"
COMPRESSIONS = ("mean", "max", "conv")
FEED_FORWARDS = ("relu", "geglu", "swiglu")  # Shazeer 2020 for the gated two
GATES = ("none", "gru")  # of residuals; Parisotto et al. 2020 for "gru"


@dataclasses.dataclass(frozen=True)
class ModelConfig(MemoryFields):
    """A Transformer-XL; the defaults are the paper's 12 layers for enwik8 (Table 2).

    `fields` constrains single values; the checks below and in `MemoryFields` refuse
    combinations, and `config.Config` those of several sections.
    """

    # The number of tokens in the vocabulary. 0 takes it from the data.
    vocab_size: int = at_least(0, 0)
    n_layer: int = at_least(1, 12)  # The number of layers.
    d_model: int = at_least(1, 512)  # The number of features of a token between layers.
    # The number of features of an embedding. 0 stands for d_model.
    d_embed: int = at_least(0, 0)
    n_head: int = at_least(1, 8)  # The number of attention heads in a layer.
    d_head: int = at_least(1, 64)  # The number of features of an attention head.
    # The number of hidden features of the feed-forward layers.
    d_inner: int = at_least(1, 2048)

    # The adaptive embedding and softmax (Grave et al. 2017; Baevski and Auli 2019).

    # The first id of each cluster of the adaptive softmax but the most frequent one.
    # Empty turns the clusters off.
    cutoffs: tuple[int, ...] = ()
    # Embeddings of cluster i have d_embed // div_val^i features.
    div_val: int = at_least(1, 1)
    tie_weights: bool = True  # Shares the tables of the embedding and the softmax.
    # Shares also the projections of the embedding and the softmax: true or false for
    # each cluster. Empty shares none.
    tie_projs: tuple[bool, ...] = ()
    # With div_val, projects also embeddings that have d_model features already.
    proj_same_dim: bool = True

    # Positions and memory.

    # The position encoding, one of POSITIONS.
    position: str = one_of(POSITIONS, "transformer_xl")
    # The number of learned distances (shaw) or positions (learned).
    n_position: int = at_least(0, 0)
    # The number of buckets of distances (t5).
    n_bucket: int = at_least(2, 32)
    # The distance from which on all are in the last bucket (t5).
    max_distance: int = at_least(2, 128)
    untie_r: bool = False  # Gives each layer biases u and w of its own.
    # The number of tokens in the memory during training.
    mem_len: int = field(at_least(0, 512), "free")
    # The memory at the start: empty, or zeros that every token attends to.
    initial_memory: str = field(one_of(("empty", "zeros"), "empty"), "free")
    # The states in the memory of a layer: those of the layer "below", its inputs, or of
    # the "same" layer, its outputs. "same" reads one segment after the other.
    recurrence: str = field(one_of(RECURRENCES, "below"), "free")
    # Distances above this one count as this one. 0 sets no limit.
    clamp_len: int = field(at_least(0, 0), "free")
    # Every query sees mem_len keys, its own included.
    same_length: bool = field(False, "free")
    # With same_length, every query sees mem_len keys and its own.
    same_length_self: bool = False
    # The number of earlier tokens whose keys and values one layer keeps, to retrieve
    # the best of those beyond its memory (Wu et al. 2022). 0 turns retrieval off.
    retrieval_len: int = field(at_least(0, 0), "free")
    # The number of tokens that each head of a query retrieves.
    retrieval_top_k: int = field(at_least(1, 32), "free")
    # The layer that retrieves, counted from 1. 0 takes the one at three quarters of the
    # depth.
    retrieval_layer: int = field(at_least(0, 0), "free")
    # The number of memory tokens that each segment reads and writes (Bulatov et al.
    # 2022). They need train.gradient_segments above 1. 0 turns them off.
    memory_tokens: int = field(at_least(0, 0), "free")
    # The number of slots of the compressed memory (Rae et al. 2019). 0 turns it off.
    compressed_len: int = field(at_least(0, 0), "free")
    # The number of states that leave the memory to become one compressed slot.
    compression_rate: int = at_least(0, 0)
    # How they are compressed, one of COMPRESSIONS. "conv" learns it for each layer.
    compression: str = one_of(COMPRESSIONS, "mean")
    pre_lnorm: bool = False  # Normalizes before each sublayer instead of after it.
    # The gate in place of the sum after each sublayer, one of GATES. "gru" needs
    # pre_lnorm.
    gate: str = one_of(GATES, "none")
    # The norm of the sublayers, one of NORMS.
    norm: str = one_of(NORMS, "layer")
    # Normalizes the queries and keys of each head (RMSNorm), before the position terms.
    qk_norm: bool = False
    # The feed-forward layers, one of FEED_FORWARDS. The gated ones have two thirds of
    # d_inner hidden features, in multiples of 8, and so as many weights as "relu".
    feed_forward: str = one_of(FEED_FORWARDS, "relu")
    # The term that is added to the variance in norms.
    layer_norm_epsilon: float = positive(1e-5)

    # Regularisation.

    # The dropout rate of embeddings, positions and the outputs of sublayers.
    dropout: float = field(fraction(0.1), "free")
    # The dropout rate of attention probabilities.
    dropatt: float = field(fraction(0.0), "free")
    # Uses one dropout mask for all tokens of a segment.
    variational: bool = field(False, "free")
    # The dropout rate of whole words in the embedding.
    word_dropout: float = field(fraction(0.0), "free")

    # Initialization.

    # The standard deviation of initial weights and of the biases u and w.
    init_std: float = field(positive(0.02), "free")
    # The initial standard deviation of the projections of embeddings.
    proj_init_std: float = field(at_least(0, 0.01), "free")
    # The initial standard deviation of the scales of norms, around 1, and of the
    # softmax's rows for clusters.
    norm_init_std: float = field(at_least(0, 0.0), "free")

    # Computation.

    # The type of activations and memory, float32 or bfloat16. Parameters and the loss
    # are float32.
    dtype: str = field(one_of(("float32", "bfloat16"), "float32"), "free")
    # The attention kernel, one of KERNELS. "auto" takes the fastest for the device.
    kernel: str = field(
        one_of(KERNELS, "auto"),
        "free",
        "changeable",
        modes=f"{TRAINING} evaluate generate score export speed recl",
    )
    # The activations that each layer keeps for the backward pass: "none" keeps all of
    # them (no rematerialization), "full" only the layer's input, "dots" also the
    # results of products with weights, "save:q,k" also these of REMAT_NAMES, and
    # "offload:q,k" the same in the host's memory.
    remat_policy: str = field(
        "none", "free", "changeable", modes=f"{TRAINING} evaluate export"
    )
    # The number of layers in a step of the scan over layers. n_layer unrolls the scan.
    unroll: int = field(
        at_least(1, 1), "free", "changeable", modes=f"{TRAINING} evaluate export"
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible size or combination."""
        check(self, "model")
        self._check_clusters()
        self._check_position()
        self.check_memory()
        parse_remat(self.remat_policy)
        if self.gate != "none" and not self.pre_lnorm:
            raise UserError(
                f'model.gate = "{self.gate}" needs model.pre_lnorm=true: a norm after '
                "the gate would undo what the gate keeps"
            )

    def _check_clusters(self) -> None:
        ends = (0, *self.cutoffs, self.vocab_size or 2**62)
        if any(low >= high for low, high in zip(ends, ends[1:], strict=False)):
            raise UserError(
                f"model.cutoffs = {self.cutoffs} must be rising, above 0 and below the "
                f"vocabulary's {self.vocab_size or 'size'}"
            )
        if not self.embed_sizes[-1]:
            raise UserError(
                f"model.div_val = {self.div_val} leaves the embeddings of the last of "
                f"{len(self.embed_sizes)} clusters without features: decrease it"
            )
        if self.tie_projs and len(self.tie_projs) != len(self.embed_sizes):
            raise UserError(
                f"model.tie_projs = {self.tie_projs} must be true or false for each "
                f"of the {len(self.embed_sizes)} clusters, or empty"
            )

    def _check_position(self) -> None:
        if self.d_model % 2:
            raise UserError(
                f"model.d_model = {self.d_model} must be even: half of a position's "
                "features are sines, half are cosines"
            )
        if self.position in ABSOLUTE_POSITIONS and self.mem_len:
            raise UserError(
                f'model.position = "{self.position}" with a memory of mem_len = '
                f"{self.mem_len} gives two tokens one position: set mem_len to 0, or "
                "use a relative position"
            )
        if (self.position in LEARNED_POSITIONS) != (self.n_position > 0):
            raise UserError(
                f'model.position = "{self.position}" with n_position = '
                f"{self.n_position}: {', '.join(LEARNED_POSITIONS)} need a table of "
                "n_position rows, the other positions have none"
            )
        if self.position == "t5" and self.max_distance <= self.n_bucket // 2:
            raise UserError(
                f"model.max_distance = {self.max_distance} must be above half of "
                f"model.n_bucket = {self.n_bucket}: half of the buckets have one "
                "distance each"
            )
        sizes = self.n_bucket, self.max_distance
        unused = self.position != "t5"
        if unused and sizes != (ModelConfig.n_bucket, ModelConfig.max_distance):
            raise UserError(
                f"model.n_bucket and model.max_distance = {sizes} have no effect with "
                f'model.position = "{self.position}": set it to "t5", or leave them out'
            )
        if self.untie_r and self.position != "transformer_xl":
            raise UserError(
                f'model.untie_r has no effect with model.position = "{self.position}"'
            )
        if self.position == "rotary" and self.d_head % 2:
            raise UserError(
                f"model.d_head = {self.d_head} must be even: "
                'model.position = "rotary" rotates pairs of features'
            )
        if self.position == "rotary" and self.clamp_len:
            raise UserError(
                f"clamp_len = {self.clamp_len} has no effect with model.position = "
                '"rotary", whose distances have no limit: set it to 0'
            )
        if self.same_length and not self.mem_len and not self.same_length_self:
            raise UserError(
                "same_length with mem_len = 0 would leave no key visible: set mem_len, "
                "or same_length=false"
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layers have a gate."""
        return self.feed_forward != "relu"

    @property
    def hidden_size(self) -> int:
        """F, the number of hidden features of the feed-forward layers."""
        two_thirds = self.d_inner * 2 // 3
        return (two_thirds // 8 * 8 or two_thirds or 1) if self.gated else self.d_inner

    @property
    def embed_size(self) -> int:
        """E of the most frequent cluster."""
        return self.d_embed or self.d_model

    @property
    def embed_sizes(self) -> list[int]:
        """E of each of the G + 1 clusters, the most frequent first."""
        return [
            self.embed_size // self.div_val**g for g in range(len(self.cutoffs) + 1)
        ]

    @property
    def compute_dtype(self) -> Any:
        """The dtype of activations and memory."""
        import jax.numpy as jnp  # here: the command line is parsed without jax

        return jnp.dtype(self.dtype)
