"""Table 6: the relative positions of Shaw et al. (2018).

    python -m txl_jax.main --config=wt103_shaw

Published: perplexity 27.94 with attention to 256 tokens, as in training; 26.77 with the
paper's positions. Differs from wt103_128m in the positions, and is evaluated with the
attention length of training. The scores have the paper's terms (a) and (b); the variant
of the released code is "shaw_biased".
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_128m


def get_config() -> ConfigDict:
    c = wt103_128m.get_config()
    c.model.update(position="shaw", n_position=256)
    c.eval.mem_len = 256  # the longest that helped
    return c
