"""Table 6: a loss on only the later half of each segment.

    python -m txl_jax.main --config=wt103_half_loss

Published: perplexity 28.33 with attention to 460 tokens, 28.69 with the attention
length of training; 26.77 with the full loss. Differs from wt103_128m in the loss.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_128m


def get_config() -> ConfigDict:
    c = wt103_128m.get_config()
    c.train.half_loss = True
    c.eval.mem_len = 460  # the longest that helped
    return c
