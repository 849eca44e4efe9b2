"""Options of generation."""

import dataclasses

from txl_jax.fields import at_least, between, check, field
from txl_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What to sample, and how: temperature applies first, then top_k, then top_p."""

    prompt: str = field(
        "\n",
        help="Text to continue, or @FILE for a file with one prompt on each line. @- "
        "reads stdin.",
    )
    context_tokens: int = field(
        0,
        help="Tokens of eval.split to continue instead of a prompt. 0 uses the prompt.",
    )
    samples: int = field(
        1,
        between(1, 10**6),
        help="Samples of each prompt, with the seeds seed, seed + 1 and so on.",
    )
    num_tokens: int = field(300, at_least(1), help="Tokens to sample.")
    temperature: float = field(
        1.0, help="Divisor of the logits. 0 always takes the likeliest token."
    )
    top_k: int = field(
        40, help="Number of likeliest tokens to sample from. 0 samples from all."
    )
    top_p: float = field(
        1.0,
        between(0, 1),
        help="Samples come from the likeliest tokens whose probabilities sum to this.",
    )
    seed: int = field(1, between(0, 2**32 - 1), help="Seed of the first sample.")
    mem_len: int = field(
        512,
        help="Tokens in the memory during generation. 0 reads the newest eval.ext_len "
        "+ eval.tgt_len tokens again for each token.",
    )
    stop: str = field(
        "",
        help="Text before which a sample ends. Empty ends samples by their length "
        "alone.",
    )
    output: str = field(
        "",
        help="File to which each sample is written as a line of JSON; a .npy takes "
        'the numbers of a corpus "tokens" instead. Empty writes none.',
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "generate")


def generation_model(model_config: ModelConfig, config: GenerateConfig) -> ModelConfig:
    """Returns the model with the memory of generation; the parameters are the same."""
    return dataclasses.replace(model_config, mem_len=config.mem_len)
