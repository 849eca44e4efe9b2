"""Table 6: without recurrence.

    python -m txl_jax.main --config=wt103_no_recurrence

Published: perplexity 29.02 with attention to 260 tokens, 29.59 with the 128 of training
(--config.eval.ext_len=64); 26.77 with a memory. Differs from wt103_128m in the memory.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_128m


def get_config() -> ConfigDict:
    c = wt103_128m.get_config()
    c.model.mem_len = 0
    # Consequence: windows of 260 tokens, recomputed for every 64.
    c.eval.update(mem_len=0, ext_len=196, same_length=False, clamp_len=0)
    c.generate.mem_len = 0
    return c
