"""The paper's 24 layers for enwik8 (Table 2): 0.99 bits per character on test.

    python -m txl_jax.main --config=enwik8_24l

Published: 0.99 with 277M parameters, here 277,231,820, on 32 TPU cores in 2 to 5 days.
This project has not run it.

Values are from the released TensorFlow scripts for TPU and, for evaluation, the script
that came with the released model. They train with segments and a memory of 768 tokens;
the paper says 784.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.tensorflow())
    c.model.update(n_layer=24, d_model=1024, n_head=8, d_head=128, d_inner=3072)
    c.model.update(mem_len=768, dropout=0.15, dropatt=0.15)
    c.model.remat_policy = "save:q,k,v,r,o,hidden,sum"  # faster on a TPU
    c.data.corpus = "enwik8"
    c.train.update(batch_size=64, tgt_len=768, num_steps=400_000, segments_per_call=4)
    c.optim.update(lr=2.5e-4, warmup_steps=4000, min_lr_ratio=0.01)
    c.eval.update(streams=16, tgt_len=128, mem_len=3800, clamp_len=1000)
    c.eval.same_length = True
    c.generate.update(prompt="The ", mem_len=3800)
    return c
