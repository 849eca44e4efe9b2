"""Table 10: without recurrence, half of the loss, the longest segments in GPU memory.

    python -m txl_jax.main --config=wt103_no_recurrence_half_loss_172

Published: perplexity 28.83 with attention to 120 tokens; 28.33 with a memory and
segments of 128. Differs from wt103_no_recurrence_half_loss in the length of the
segments.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_no_recurrence_half_loss


def get_config() -> ConfigDict:
    c = wt103_no_recurrence_half_loss.get_config()
    c.train.tgt_len = 172
    return c
