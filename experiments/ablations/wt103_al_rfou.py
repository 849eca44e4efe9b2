"""Table 6: the absolute positions of Al-Rfou et al. (2018), a table for each layer.

    python -m txl_jax.main --config=wt103_al_rfou

Published: perplexity 31.16 with attention to 120 tokens; 30.10 with the paper's
positions. As in the table, there are no auxiliary losses. Differs from
wt103_no_recurrence_half_loss in the positions.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence_half_loss


def get_config() -> ConfigDict:
    c = wt103_no_recurrence_half_loss.get_config()
    c.model.update(position="learned", n_position=128)
    return c
