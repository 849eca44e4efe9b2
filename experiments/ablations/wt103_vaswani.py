"""Table 6: the absolute positions of Vaswani et al. (2017).

    python -m txl_jax.main --config=wt103_vaswani

Published: perplexity 30.97 with attention to 120 tokens; 30.10 with the paper's
positions. Differs from wt103_no_recurrence_half_loss in the positions.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence_half_loss


def get_config() -> ConfigDict:
    c = wt103_no_recurrence_half_loss.get_config()
    c.model.position = "sinusoidal"
    return c
