"""The sizes and variants of a Transformer-XL, under the paper's names."""

import dataclasses
from typing import TYPE_CHECKING, Any

from txl_jax.errors import UserError, nearest, refuse
from txl_jax.fields import (
    WITH_MODEL,
    Role,
    Section,
    at_least,
    field,
    fraction,
    one_of,
    positive,
)

if TYPE_CHECKING:
    import numpy as np

POSITIONS = (
    "transformer_xl",  # section 3.3
    "shaw",  # Shaw et al. 2018: learned distances, as in the paper's ablation
    "shaw_biased",  # the same with the reference code's u and a bias per distance
    "sinusoidal",  # Vaswani et al. 2017: absolute, added to the embeddings
    "learned",  # Al-Rfou et al. 2018: absolute, added to each layer's input
    "rotary",  # Su et al. 2021: queries and keys are rotated by their positions
    "alibi",  # Press et al. 2022: scores fall linearly with distance
    "none",
)
ABSOLUTE_POSITIONS = ("sinusoidal", "learned")
LEARNED_POSITIONS = ("shaw", "shaw_biased", "learned")
REMAT_POLICIES = ("none", "full", "dots", "save:NAMES", "offload:NAMES")
# Queries, keys, values, projected distances, the results of `chunked` and `tpu`, the
# feed-forward's inner features, and the sums with the residual.
REMAT_NAMES = ("q", "k", "v", "r", "o", "hidden", "sum")
GATES = ("none", "gru")  # instead of residual sums; "gru" is Parisotto et al. 2020
# Roles of fields that parameters do not depend on.
FREE = Role.IDENTITY | Role.INHERITED


@dataclasses.dataclass(frozen=True)
class ModelConfig(
    Section,
    name="model",
    modes=WITH_MODEL,
    roles=Role.IDENTITY | Role.ARCHITECTURE | Role.INHERITED,
):
    """A Transformer-XL; the defaults are the paper's 12 layers for enwik8 (Table 2).

    Each field constrains its own value, the checks below refuse combinations, and
    `config.Config` refuses combinations across sections.
    """

    vocab_size: int = field(0, help="Vocabulary size. 0 takes it from the data.")
    n_layer: int = field(12, at_least(1), help="Number of layers.")
    d_model: int = field(512, at_least(1), help="Features of a token between layers.")
    d_embed: int = field(0, help="Features of an embedding. 0 stands for d_model.")
    n_head: int = field(8, at_least(1), help="Attention heads of a layer.")
    d_head: int = field(64, at_least(1), help="Features of an attention head.")
    d_inner: int = field(
        2048, at_least(1), help="Hidden features of the feed-forward layers."
    )

    # The adaptive embedding and softmax (Grave et al. 2017; Baevski and Auli 2019).

    cutoffs: tuple[int, ...] = field(
        (), help="First ids of clusters of the adaptive softmax. Empty has none."
    )
    div_val: int = field(
        1,
        at_least(1),
        help="Cluster i has embeddings of d_embed // div_val^i features.",
    )
    tie_weights: bool = field(True, help="Shares embedding and softmax tables.")
    tie_projs: tuple[bool, ...] = field(
        (), help="Shares projections too, by cluster. Empty shares none."
    )
    proj_same_dim: bool = field(
        True, help="With div_val, projects also embeddings of d_model features."
    )

    # Positions and memory.

    position: str = field(
        "transformer_xl", one_of(POSITIONS), help="Position encoding."
    )
    n_position: int = field(0, help="Learned distances (shaw) or positions (learned).")
    untie_r: bool = field(False, help="Gives each layer biases u and w of its own.")
    mem_len: int = field(512, roles=FREE, help="Tokens in the memory during training.")
    initial_memory: str = field(
        "empty",
        one_of(("empty", "zeros")),
        roles=FREE,
        help='Memory at the start: "empty" has nothing to attend to; "zeros" has '
        "mem_len zero vectors, which are attended to.",
    )
    clamp_len: int = field(
        0,
        roles=FREE,
        help="Distances above this are treated as equal to it. 0 sets no limit.",
    )
    same_length: bool = field(False, roles=FREE, help="Every query sees mem_len keys.")
    same_length_self: bool = field(
        False, help="With same_length, every query sees mem_len keys and its own."
    )
    fast_weights: bool = field(
        False,
        roles=FREE,
        help="Writes states that leave the memory into matrices (delta rule).",
    )
    pre_lnorm: bool = field(False, help="Normalizes before sublayers, not after.")
    gate: str = field(
        "none",
        one_of(GATES),
        help='Gate instead of residual sums; "gru" is meant for pre_lnorm.',
    )
    norm: str = field("layer", one_of(("layer", "rms")), help="Norm of the sublayers.")
    qk_norm: bool = field(False, help="Normalizes queries and keys of each head.")
    feed_forward: str = field(
        "relu",
        one_of(("relu", "geglu", "swiglu")),
        help="Feed-forward layers. The gated ones have 2/3 of d_inner features.",
    )
    layer_norm_epsilon: float = field(
        1e-5, positive, help="Added to the variance in norms."
    )

    # Regularisation.

    dropout: float = field(
        0.1,
        fraction,
        roles=FREE,
        help="Dropout of embeddings, positions, sublayers' outputs and the output.",
    )
    outer_dropout: float = field(
        0.0,
        fraction,
        roles=FREE,
        help="Dropout of embeddings and the output, instead of model.dropout. 0 is "
        "model.dropout.",
    )
    dropatt: float = field(
        0.0, fraction, roles=FREE, help="Dropout of attention probabilities."
    )
    variational: bool = field(
        False, roles=FREE, help="One dropout mask for a whole segment."
    )
    word_dropout: float = field(
        0.0, fraction, roles=FREE, help="Dropout of words in the embedding."
    )

    # Initialization.

    init_std: float = field(
        0.02,
        positive,
        roles=FREE,
        help="Standard deviation of weights, and of u and w.",
    )
    proj_init_std: float = field(
        0.01, roles=FREE, help="Standard deviation of embeddings' projections."
    )
    norm_init_std: float = field(
        0.0,
        roles=FREE,
        help="Standard deviation of norms' scales and the softmax's cluster rows.",
    )

    # Computation.

    dtype: str = field(
        "float32",
        one_of(("float32", "bfloat16")),
        roles=FREE,
        help="Type of activations and memory. Parameters and the loss are float32.",
    )
    kernel: str = field(
        "auto",
        one_of(("auto", "xla", "chunked", "cudnn", "tpu")),
        modes="train evaluate generate score import export compile table speed recl",
        roles=Role.INHERITED,
        help='Attention kernel. "auto" takes the fastest: on a GPU or TPU, training '
        'measures. Elsewhere it is "xla".',
    )
    remat_policy: str = field(
        "none",
        modes="train evaluate import export compile table",
        roles=Role.INHERITED,
        help='Activations that each layer keeps for the backward pass: "none" keeps '
        'all of them (no rematerialization), "full" only the layer\'s input, '
        '"dots" also products with weights, "save:q,k" also the named ones (of '
        f"{', '.join(REMAT_NAMES)}), "
        'and "offload:q,k" the same in the host\'s memory.',
    )
    unroll: int = field(
        0,
        modes="train evaluate import export compile table",
        roles=Role.INHERITED,
        help="Layers in a step of the scan. 0 is the device's fastest.",
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible size or combination."""
        super().__post_init__()
        self._check_clusters()
        self._check_position()
        self._check_fast_weights()
        parse_remat(self.remat_policy)

    def _check_clusters(self) -> None:
        ends, sizes = (0, *self.cutoffs, self.vocab_size or 2**62), self.embed_sizes
        refuse(
            any(low >= high for low, high in zip(ends, ends[1:], strict=False)),
            f"model.cutoffs = {self.cutoffs} must be rising, above 0 and below the "
            f"vocabulary's {self.vocab_size or 'size'}",
        )
        refuse(
            not sizes[-1],
            f"model.div_val = {self.div_val} leaves the embeddings of the last of "
            f"{len(sizes)} clusters without features: decrease it",
        )
        refuse(
            len(self.tie_projs) not in (0, len(sizes)),
            f"model.tie_projs = {self.tie_projs} must be true or false for each of the "
            f"{len(sizes)} clusters, or empty",
        )

    def _check_position(self) -> None:
        refuse(
            self.position in ABSOLUTE_POSITIONS and self.mem_len,
            f'model.position = "{self.position}" with a memory of mem_len = '
            f"{self.mem_len} gives two tokens one position: set mem_len to 0, or use a "
            "relative position",
        )
        refuse(
            self.position in LEARNED_POSITIONS and not self.n_position,
            f'model.position = "{self.position}" needs model.n_position, the rows of '
            "its table",
        )
        refuse(
            self.same_length and not self.mem_len and not self.same_length_self,
            "same_length with mem_len = 0 would leave no key visible: set mem_len, or "
            "same_length=false",
        )

    def _check_fast_weights(self) -> None:
        refuse(
            self.fast_weights and not self.mem_len,
            "model.fast_weights absorbs states that leave a memory: set mem_len above "
            "0",
        )
        refuse(
            self.fast_weights and self.initial_memory == "zeros",
            'model.fast_weights does not combine with model.initial_memory = "zeros": '
            "leave one of them out",
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
    def compute_dtype(self) -> "np.dtype[Any]":
        """The dtype of activations and memory."""
        import jax.numpy as jnp  # here: the command line is parsed without jax

        return jnp.dtype(self.dtype)


def parse_remat(policy: str) -> tuple[str, tuple[str, ...]]:
    """Returns what precedes the colon of a remat policy, and the names after it."""
    base, colon, text = policy.partition(":")
    names = tuple(text.split(",")) if colon else ()
    if base in ("save", "offload") and set(names) <= set(REMAT_NAMES) and names:
        return base, names
    if policy in REMAT_POLICIES[:3]:
        return base, ()
    raise UserError(
        f"model.remat_policy = {policy!r} must be one of {', '.join(REMAT_POLICIES)}"
        f"{nearest(policy, REMAT_POLICIES)}; NAMES are some of {', '.join(REMAT_NAMES)}"
    )


# Differences between the code bases of published models, besides sizes.


def pytorch(**fields: Any) -> ModelConfig:
    """Returns the config of a model of the paper's PyTorch code."""
    std = fields.get("init_std", ModelConfig.init_std)
    return ModelConfig(**{"norm_init_std": std} | fields)


def nvidia(**fields: Any) -> ModelConfig:
    """Returns the config of a model of NVIDIA's PyTorch code."""
    return pytorch(**{"same_length_self": True} | fields)


def huggingface(**fields: Any) -> ModelConfig:
    """Returns the config of a model of Hugging Face's port."""
    return pytorch(**{"initial_memory": "zeros", "untie_r": True} | fields)


def tensorflow(**fields: Any) -> ModelConfig:
    """Returns the config of a model of the paper's TensorFlow code."""
    fields = {
        "layer_norm_epsilon": 1e-12,
        "initial_memory": "zeros",
        "same_length_self": True,
        **fields,
    }
    return ModelConfig(**fields)
