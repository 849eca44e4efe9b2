"""A character-level Transformer-XL on tiny Shakespeare, in minutes on a laptop's CPU.

    python -m txl_jax.main --config=shakespeare

Not in the paper: 799,425 parameters read 1,536,000 characters in a few minutes, as many
as in nanoGPT's CPU recipe (804,096 parameters, 2,000 updates of 12 blocks of 64), which
reaches about 1.88 nats per character on the last tenth of the plays. Here segments have
32 characters and the memory 64, and 256 in evaluation. Expected: 1.65 nats (2.39 bits).
The test split is the validation split.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default()
    c.data.corpus = "shakespeare"
    c.model.update(n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=448)
    c.model.update(mem_len=64, dropout=0.0)
    c.train.update(batch_size=24, tgt_len=32, segments_per_call=4)
    c.train.update(num_steps=2000, eval_every=200, log_every=20)
    c.optim.update(lr=3e-3, warmup_steps=100)
    c.eval.update(streams=8, tgt_len=128, mem_len=256)
    c.generate.update(num_tokens=500, temperature=0.8, mem_len=256)
    c.checkpoint.update(every_steps=500, keep=1)
    return c
