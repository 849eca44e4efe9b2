"""The baseline of the paper's ablation on One Billion Word (Table 7), about 0.3B.

    python -m txl_jax.main --config=lm1b_300m

Published: perplexity 25.2 after 400,000 updates; hardware and time unknown. This
project has not run it.

The paper states 20 layers, the number of updates and about 0.3B parameters, and nothing
else. This is the base model with d_inner 2048, which has 299,108,193 parameters.
"""

from ml_collections import ConfigDict

from txl_jax.experiments import lm1b


def get_config() -> ConfigDict:
    c = lm1b.get_config()
    c.model.d_inner = 2048
    return c
