"""The paper's 18 layers for enwik8 (Table 2): 1.03 bits per character on test.

    python -m txl_jax.main --config=enwik8_18l

Published: 1.03 with 88M parameters; hardware and time unknown. This project has not
run it.

Unknown, and ours: every size, chosen for 88,703,564 parameters, and the recipe, taken
from the 24 layers. Neither the paper nor the released scripts have any of it.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.tensorflow())
    c.model.update(n_layer=18, d_model=640, n_head=8, d_head=80, d_inner=2240)
    c.model.update(mem_len=768, dropout=0.15, dropatt=0.15)
    c.data.corpus = "enwik8"
    c.train.update(batch_size=64, tgt_len=768, num_steps=400_000, segments_per_call=4)
    c.optim.update(lr=2.5e-4, warmup_steps=4000, min_lr_ratio=0.01)
    c.eval.update(streams=16, tgt_len=128, mem_len=3800, clamp_len=1000)
    c.eval.same_length = True
    c.generate.update(prompt="The ", mem_len=3800)
    return c
