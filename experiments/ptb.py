"""The paper's model for Penn Treebank (Table 5): test perplexity 54.52.

    python -m txl_jax.main --config=ptb

Published: 54.52 with 24M parameters, here 24,015,760; hardware and time unknown. This
project has not run it.

Unknown, and ours: every value. The paper says only that variational dropout and weight
averaging were added, as in AWD-LSTM (Merity et al. 2018), without finetuning; the 20
streams of 70 tokens, varying segment lengths and dropped words are also that model's.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.pytorch())
    c.model.update(n_layer=12, d_model=400, n_head=10, d_head=40, d_inner=1080)
    c.model.update(dropout=0.4, dropatt=0.2, word_dropout=0.1, variational=True)
    c.model.mem_len = 70
    c.data.corpus = "ptb"
    c.train.update(batch_size=20, tgt_len=70, num_steps=200_000, varlen=True)
    c.train.segments_per_call = 4
    c.optim.update(lr=2.5e-4, warmup_steps=2000, weight_decay=1e-2)
    c.optim.update(asgd_from=100_000)
    c.eval.update(streams=10, tgt_len=64, mem_len=640, clamp_len=400, same_length=True)
    c.generate.mem_len = 640
    return c
