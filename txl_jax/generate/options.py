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
    # index of the first token of the context; -1 = drawn from each sample's seed
    context_at: int = at_least(-1, -1)
    warmup: str = ""  # text, or @FILE, read before the prompt and not shown
    samples: int = at_least(1, 1)  # samples of each prompt, with seed, seed + 1, ...
    num_tokens: int = at_least(1, 300)  # tokens to sample
    temperature: float = at_least(0, 1.0)  # divisor of the logits; 0 = greedy
    top_k: int = at_least(0, 40)  # number of likeliest tokens to sample from; 0 = all
    # sample from the likeliest tokens whose probabilities sum to this
    top_p: float = 1.0
    seed: int = between(0, 2**32 - 1, 1)  # seed of the random numbers
    mem_len: int = at_least(0, 512)  # tokens in the memory
    ext_len: int = at_least(0, 0)  # tokens read again for each token; needs mem_len = 0
    stop: str = ""  # text before which a sample ends; "" = none
    stop_token: int = at_least(-1, -1)  # id of the token that ends a sample; -1 = none
    stream_every: int = at_least(1, 32)  # tokens sampled on the device between prints
    detokenize: bool = False  # undo the corpus's tokenization into words
    # print each token's nll before temperature, top_k and top_p
    scores: bool = False
    # file to write one JSON line per sample to, with scores; "" = none
    output: str = ""

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "generate")
        if self.ext_len and self.mem_len:
            raise UserError(
                f"generate.ext_len = {self.ext_len} with generate.mem_len = "
                f"{self.mem_len} would show the same tokens twice: set one of them to 0"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p = {self.top_p} must be above 0, at most 1")
        if self.context_at >= 0 and not self.context_tokens:
            raise UserError(
                f"generate.context_at = {self.context_at} needs the length of the "
                "context: set generate.context_tokens"
            )
        if not self.prompt:
            raise UserError(
                "generate.prompt is empty, but the model needs a token to continue: "
                r"give at least a line end, --prompt=$'\n'"
            )


def generation_model(model_config: ModelConfig, config: GenerateConfig) -> ModelConfig:
    """Returns the model with the memory of generation; the parameters are the same."""
    return dataclasses.replace(model_config, mem_len=config.mem_len)
