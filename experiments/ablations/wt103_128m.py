"""The model of the paper's ablation on WikiText-103 (Table 6): 128M parameters.

    python -m txl_jax.main --config=wt103_128m

Published: perplexity 26.77 with attention to 500 tokens, 27.02 attending as far as in
training (--config.eval.mem_len=256). Hardware and time unknown. This project has not
run it.

The paper gives the length of the segments, 128 tokens. That training attended to 256,
memory and segment, is read from wt103_shaw's row, which reaches its best there without
attending farther than in training. The rest is unknown: this is the
standard model with 7 of its 16 layers, which has 128,007,688 parameters. Which split
was scored is unknown too: valid, to judge by the table's 23.09 where test gave 24.0.
"""

from ml_collections import ConfigDict

from txl_jax.experiments import wt103


def get_config() -> ConfigDict:
    c = wt103.get_config()
    c.model.update(n_layer=7, mem_len=128)
    c.train.tgt_len = 128
    c.eval.update(split="valid", mem_len=500)
    return c
