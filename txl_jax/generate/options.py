"""Options of generation."""

import dataclasses

from txl_jax.fields import Role, Section, at_least, between, field
from txl_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class GenerateConfig(Section, name="generate", modes="train generate import"):
    """Prompts and sampling: temperature applies first, then top_k, then top_p."""

    prompt: str = field(
        "\n",
        modes="train generate import table",
        help="Text to continue, @FILE with a prompt per line, or @- for stdin.",
    )
    context_tokens: int = field(
        0, help="Tokens of eval.split to continue instead. 0 uses the prompt."
    )
    samples: int = field(
        1, between(1, 10**6), help="Samples of each prompt, with rising seeds."
    )
    num_tokens: int = field(300, at_least(1), help="Tokens to sample.")
    temperature: float = field(
        1.0, help="Divisor of the logits. 0 takes the likeliest token."
    )
    top_k: int = field(40, help="Likeliest tokens to sample from. 0 takes all.")
    top_p: float = field(
        1.0,
        between(0, 1),
        help="Total probability of the likeliest tokens to sample from.",
    )
    seed: int = field(1, between(0, 2**32 - 1), help="Seed of the first sample.")
    mem_len: int = field(
        512,
        modes="train generate import export table",
        help="Tokens in the memory. 0 reads the newest eval.ext_len + eval.tgt_len "
        "tokens again for each token.",
    )
    stop: str = field(
        "", help="Text before which a sample's text ends. Empty ends by length alone."
    )
    output: str = field(
        "",
        roles=Role.LOCAL,
        help="File of JSON lines, or of numbers (.npy). Empty writes none.",
    )


def generation_model(model_config: ModelConfig, config: GenerateConfig) -> ModelConfig:
    """Returns the model with the memory of generation; the parameters are the same."""
    return dataclasses.replace(model_config, mem_len=config.mem_len)
