"""Table 7: the relative positions of Shaw et al. (2018).

    python -m txl_jax.main --config=lm1b_shaw

Published: perplexity 25.7; 25.2 with the paper's positions. Differs from lm1b_300m in
the positions, which have no biases u and w to untie.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import lm1b_300m


def get_config() -> ConfigDict:
    c = lm1b_300m.get_config()
    c.model.update(position="shaw", n_position=512, untie_r=False)
    return c
