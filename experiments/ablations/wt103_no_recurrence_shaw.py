"""Table 6: without recurrence, and with the relative positions of Shaw et al. (2018).

    python -m txl_jax.main --config=wt103_no_recurrence_shaw

Published: perplexity 29.75 with attention to 120 tokens; 29.02 with the paper's
positions. Differs from wt103_no_recurrence in the positions, and is evaluated with the
attention length of training, since positions beyond it are not trained.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence


def get_config() -> ConfigDict:
    c = wt103_no_recurrence.get_config()
    c.model.update(position="shaw", n_position=128)
    c.eval.ext_len = 56  # windows of 120 tokens, the longest that helped
    return c
