"""NVIDIA's base model for WikiText-103 (its README): test perplexity 23.2.

    python -m txl_jax.main --config=wt103_nvidia

Published: 23.24 on 8 A100 of 40 GB, in 110 minutes with TF32 and in 76 with mixed
precision (here --config.model.dtype=bfloat16); 16 seeds gave 23.24 +- 0.078. It has
191,950,298 parameters. This project has not run it.

Values are from NVIDIA's wt103_base.yaml for PyTorch. As here, its evaluation first
fills each memory with the text before it, unscored. It fills the first stream's with
the corpus's end; here that memory starts empty.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.nvidia())
    c.model.update(n_layer=16, d_model=512, n_head=8, d_head=64, d_inner=2048)
    c.model.update(cutoffs=(19997, 39997, 199997), mem_len=192, dropout=0.1)
    c.data.corpus = "wikitext103"
    c.train.update(batch_size=256, tgt_len=192, num_steps=40_000, order="roll")
    c.train.update(segments_per_call=4, eval_every=5000)
    c.checkpoint.every_steps = 5000
    c.optim.update(optimizer="lamb", lr=0.01)
    c.optim.update(warmup_steps=1000, min_lr_ratio=0.1)
    c.eval.update(streams=16, tgt_len=64, mem_len=640, clamp_len=400, same_length=True)
    c.eval.warm_start = True
    c.generate.mem_len = 640
    return c
