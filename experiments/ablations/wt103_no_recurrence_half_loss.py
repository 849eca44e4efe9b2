"""Table 6: without recurrence, and with a loss on only the later half of each segment.

    python -m txl_jax.main --config=wt103_no_recurrence_half_loss

Published: perplexity 30.10 with attention to 120 tokens; 29.02 with the full loss.
Differs from wt103_no_recurrence in the loss.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence


def get_config() -> ConfigDict:
    c = wt103_no_recurrence.get_config()
    c.train.half_loss = True
    c.eval.ext_len = 56  # windows of 120 tokens, the longest that helped
    return c
