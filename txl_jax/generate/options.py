"""Options of generation."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig
from txl_jax.runtime.constraint import at_least, between, check


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What to sample, and how: temperature applies first, then top_k, then top_p."""

    # text to continue, or @FILE with one prompt on each line; @- = stdin
    prompt: str = "\n"
    # tokens of eval.split to continue instead of a prompt; 0 = use the prompt
    context_tokens: int = at_least(0, 0)
    # samples of each prompt, with seed, seed + 1, ...
    samples: int = between(1, 10**6, 1)
    num_tokens: int = at_least(1, 300)  # tokens to sample
    temperature: float = at_least(0, 1.0)  # divisor of the logits; 0 = greedy
    top_k: int = at_least(0, 40)  # number of likeliest tokens to sample from; 0 = all
    # sample from the likeliest tokens whose probabilities sum to this
    top_p: float = 1.0
    seed: int = between(0, 2**32 - 1, 1)  # seed of the random numbers
    # tokens in the memory; 0 = for each token, read the newest eval.ext_len +
    # eval.tgt_len again
    mem_len: int = at_least(0, 512)
    stop: str = ""  # text before which a sample ends; "" = none
    detokenize: bool = False  # undo the corpus's tokenization into words
    output: str = ""  # file to write one JSON line per sample to; "" = none

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "generate")
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p = {self.top_p} must be above 0, at most 1")
        if not self.prompt:
            raise UserError(
                "generate.prompt is empty, but the model needs a token to continue: "
                r"give at least a line end, --prompt=$'\n'"
            )


def generation_model(model_config: ModelConfig, config: GenerateConfig) -> ModelConfig:
    """Returns the model with the memory of generation; the parameters are the same."""
    return dataclasses.replace(model_config, mem_len=config.mem_len)
