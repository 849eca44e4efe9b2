"""The paper's 24 layers for text8 (Table 3): 1.08 bits per character on test.

    python -m txl_jax.main --config=text8

Published: 1.08 with 277M parameters, here 277,050,395, on 32 TPU cores in 2 to 5 days.
This project has not run it.

Values are from the released TensorFlow scripts for enwik8 on TPU, as the paper says,
and, for evaluation, the script that came with the released model. PyTorch's script for
text8 has no warm-up.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.tensorflow())
    c.model.update(n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072)
    c.model.update(mem_len=768, dropout=0.15, dropatt=0.15)
    c.data.corpus = "text8"
    c.train.update(batch_size=64, tgt_len=768, num_steps=400_000, segments_per_call=4)
    c.optim.update(lr=2.5e-4, warmup_steps=4000, min_lr_ratio=0.01)
    c.eval.update(streams=16, tgt_len=128, mem_len=3800, clamp_len=1000)
    c.eval.same_length = True
    c.generate.update(prompt="the ", mem_len=3800)
    return c
