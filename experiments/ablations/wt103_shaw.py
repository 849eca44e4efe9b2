"""Table 6: the positions of Shaw et al. (2018) in place of ours.

    python -m txl_jax.main --config=wt103_shaw

Published: perplexity 27.94 with attention to 256 tokens, the same as in training; ours
26.77. Differs from wt103_128m in the positions, and attends as far as it learned. Here
they are the paper's terms (a) and (b); "shaw_biased" is what the released code has.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_128m


def get_config() -> ConfigDict:
    c = wt103_128m.get_config()
    c.model.update(position="shaw", n_position=256)
    c.eval.mem_len = 256  # the longest that helped
    return c
