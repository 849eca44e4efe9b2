"""Options of generation."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.fields import at_least, between, check, field
from txl_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """What to sample, and how: temperature applies first, then top_k, then top_p."""

    # The text to continue, or @FILE for a file with one prompt on each line. @- reads
    # stdin.
    prompt: str = field("\n", modes="generate table")
    # The number of tokens of eval.split to continue instead of a prompt. 0 uses the
    # prompt.
    context_tokens: int = at_least(0, 0)
    # The number of samples of each prompt, which have the seeds seed, seed + 1 and so
    # on.
    samples: int = between(1, 10**6, 1)
    num_tokens: int = at_least(1, 300)  # The number of tokens to sample.
    # The divisor of the logits. 0 always takes the likeliest token.
    temperature: float = at_least(0, 1.0)
    # The number of likeliest tokens to sample from. 0 samples from all.
    top_k: int = at_least(0, 40)
    # Samples come from the likeliest tokens whose probabilities sum to this.
    top_p: float = 1.0
    # The seed of the random numbers of the first sample.
    seed: int = between(0, 2**32 - 1, 1)
    # The number of tokens in the memory during generation. 0 reads the newest
    # eval.ext_len + eval.tgt_len tokens again for each token.
    mem_len: int = field(at_least(0, 512), modes="generate table export")
    # The text before which a sample ends. Empty ends samples by their length alone.
    stop: str = ""
    # The file to which each sample is written as a line of JSON; a .npy takes the
    # numbers of a corpus "tokens" instead. Empty writes none.
    output: str = field("", "local")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value or combination."""
        check(self, "generate")
        if not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p = {self.top_p} must be above 0, at most 1")


def generation_model(model_config: ModelConfig, config: GenerateConfig) -> ModelConfig:
    """Returns the model with the memory of generation; the parameters are the same."""
    return dataclasses.replace(model_config, mem_len=config.mem_len)
