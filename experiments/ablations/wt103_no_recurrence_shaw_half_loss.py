"""Table 6: positions of Shaw et al. (2018), without recurrence, half of the loss.

    python -m txl_jax.main --config=wt103_no_recurrence_shaw_half_loss

Published: perplexity 30.50 with attention to 120 tokens; 29.75 with the full loss.
Differs from wt103_no_recurrence_shaw in the loss.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence_shaw


def get_config() -> ConfigDict:
    c = wt103_no_recurrence_shaw.get_config()
    c.train.half_loss = True
    return c
