"""The baseline of the paper's ablation on WikiText-103 (Table 6), 128M parameters.

    python -m txl_jax.main --config=wt103_128m

Published: perplexity 26.77 with attention to 500 tokens, 27.02 with the attention
length of training (--config.eval.mem_len=256). Hardware and time unknown. This project
has not run it.

The paper states segments of 128 tokens. An attention length of 256 in training, memory
and segment together, follows from the row of wt103_shaw, which reaches its best there
and cannot attend to more tokens than in training. Nothing else is stated: this is the
standard model with 7 of its 16 layers, which has 128,007,688 parameters. The scored
split is not stated either. It was probably valid: wt103_151m has 23.09, and 24.0 on
test.
"""

from ml_collections import ConfigDict

from txl_jax.experiments import wt103


def get_config() -> ConfigDict:
    c = wt103.get_config()
    c.model.update(n_layer=7, mem_len=128)
    c.train.tgt_len = 128
    c.eval.update(split="valid", mem_len=500)
    return c
