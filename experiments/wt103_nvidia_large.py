"""NVIDIA's large model for WikiText-103 (its README): test perplexity 18.2.

    python -m txl_jax.main --config=wt103_nvidia_large

Published: 18.19 on 8 A100 of 40 GB with mixed precision (here
--config.model.dtype=bfloat16) in 430 minutes; with TF32 in 735. 16 seeds gave 18.17 +-
0.040, and in validation 32.63 +- 0.20 at update 10,000 and 17.80 at 100,000. It has
285,167,482 parameters. This project has not run it.

Values are from NVIDIA's wt103_large.yaml for PyTorch; its projections are tied in all
clusters but the first. Its evaluation first fills each memory with the text before it,
unscored, and the first stream's with the corpus's end; here that memory starts empty.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.nvidia(init_std=0.005))
    c.model.update(n_layer=18, d_model=1024, n_head=16, d_head=64, d_inner=4096)
    c.model.update(cutoffs=(19997, 39997, 199997), div_val=4)
    c.model.update(tie_projs=(False, True, True, True))
    c.model.update(mem_len=384, dropout=0.2, dropatt=0.2)
    c.data.corpus = "wikitext103"
    c.train.update(batch_size=128, tgt_len=384, num_steps=100_000, order="roll")
    c.train.update(segments_per_call=4, eval_every=5000)
    c.checkpoint.every_steps = 5000
    c.optim.update(optimizer="lamb", lr=0.01)
    c.optim.update(warmup_steps=16_000, min_lr_ratio=0.01)
    c.eval.update(streams=16, tgt_len=128, mem_len=1600, clamp_len=1000)
    c.eval.update(same_length=True, warm_start=True)
    c.generate.mem_len = 1600
    return c
