"""The paper's large model for WikiText-103 (Table 1): test perplexity 18.3.

    python -m txl_jax.main --config=wt103_large

Published: 18.3 on 64 TPU cores in 2 to 5 days. Table 1 states 257M parameters, but
the released model has 285,205,322, as here. This project has not run it.

Values are from the released TensorFlow script for TPU. Its 4,000,000 updates are 1,900
epochs; whether the published model had them is unknown. proj_init_std is what the code
does: it never reads its flag.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    family = config.tensorflow(untie_r=True, init_std=0.005, proj_init_std=0.005)
    c = config.default(model=family)
    c.model.update(n_layer=18, d_model=1024, n_head=16, d_head=64, d_inner=4096)
    c.model.update(cutoffs=(20000, 40000, 200000), div_val=4)
    c.model.update(tie_projs=(False, True, True, True))
    c.model.update(mem_len=384, dropout=0.2, dropatt=0.2)
    c.model.remat_policy = "save:q,k,v,r,o,hidden,sum"  # faster on a TPU
    c.data.corpus = "wikitext103"
    c.train.update(batch_size=128, tgt_len=384, num_steps=4_000_000)
    c.train.update(segments_per_call=4, eval_every=10_000)
    c.optim.update(lr=2.5e-4, warmup_steps=16_000, min_lr_ratio=0.01)
    c.eval.update(streams=16, tgt_len=128, mem_len=1600, clamp_len=1000)
    c.eval.same_length = True
    c.generate.mem_len = 1600
    return c
