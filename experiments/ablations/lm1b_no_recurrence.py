"""Table 7: without recurrence.

    python -m txl_jax.main --config=lm1b_no_recurrence

Published: perplexity 27.1; 25.2 with a memory. Differs from lm1b_300m in the memory.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import lm1b_300m


def get_config() -> ConfigDict:
    c = lm1b_300m.get_config()
    c.model.mem_len = 0
    # Consequence: windows of 128 tokens, recomputed for every 32.
    c.eval.update(mem_len=0, ext_len=96, same_length=False)
    c.generate.mem_len = 0
    return c
