"""The paper's base model for One Billion Word (Table 4): test perplexity 23.5.

    python -m txl_jax.main --config=lm1b

Published: 23.5 with 0.46B parameters, here 466,962,273; hardware and time unknown. This
project has not run it.

20 layers of 1024 with d_inner 6144 come from the author's reply
(github.com/kimiyoung/transformer-xl/issues/69). The heads are unknown, and taken from
the released scripts, which have 18 layers and d_inner 4096. The rest is TensorFlow's
script. The text scores `<S> <S>` between sentences, a free token;
--config.data.convention=words omits it. The run also shuffled sentences: for that, set
train.order="sentences".
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.tensorflow(untie_r=True))
    c.model.update(n_layer=20, d_model=1024, n_head=8, d_head=128, d_inner=6144)
    c.model.update(cutoffs=(60000, 100000, 640000), div_val=4, proj_same_dim=False)
    c.model.update(mem_len=256, dropout=0.1)
    c.data.corpus = "lm1b"
    c.train.update(batch_size=256, tgt_len=256, num_steps=400_000, segments_per_call=4)
    c.optim.update(lr=2.5e-4, min_lr_ratio=0.004)
    c.eval.update(streams=16, tgt_len=32, mem_len=128, same_length=True)
    c.generate.mem_len = 128
    return c
