"""The paper's large model for One Billion Word (Table 4): test perplexity 21.8.

    python -m txl_jax.main --config=lm1b_large

Published: 21.8 with 0.8B parameters, here 838,078,041, on 512 TPU cores in 2 to 5 days;
the released model stands at update 1,191,000. This project has not run it.

Values are from the released TensorFlow scripts for TPU, proj_init_std from their code.
The text scores `<S> <S>` between sentences, a free token; with
--config.data.convention=words there is none. For shuffled sentences see lm1b.py.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    family = config.tensorflow(untie_r=True, init_std=0.005, proj_init_std=0.005)
    c = config.default(model=family)
    c.model.update(n_layer=24, d_model=1280, n_head=16, d_head=80, d_inner=8192)
    c.model.update(cutoffs=(60000, 100000, 640000), div_val=4, proj_same_dim=False)
    c.model.update(mem_len=32, dropout=0.05, dropatt=0.05)
    c.data.corpus = "lm1b"
    c.train.update(batch_size=512, tgt_len=32, num_steps=1_200_000)
    c.train.update(segments_per_call=8, eval_every=10_000)
    c.optim.update(lr=1e-4, warmup_steps=30_000, min_lr_ratio=0.01)
    c.eval.update(streams=16, tgt_len=32, mem_len=128, same_length=True)
    c.generate.mem_len = 128
    return c
