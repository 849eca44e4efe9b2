"""Table 10: without recurrence, and with the longest segments in the same GPU memory.

    python -m txl_jax.main --config=wt103_no_recurrence_176

Published: perplexity 27.98 with attention to 400 tokens, 28.43 with the 176 of
training; 26.77 with a memory and segments of 128. Differs from wt103_no_recurrence in
the length of the segments.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence


def get_config() -> ConfigDict:
    c = wt103_no_recurrence.get_config()
    c.train.tgt_len = 176
    c.eval.ext_len = 336  # windows of 400 tokens, the longest that helped
    return c
