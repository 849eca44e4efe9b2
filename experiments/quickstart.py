"""A byte-level Transformer-XL on the standard library's sources, on a laptop's CPU.

python -m txl_jax.main --config=experiments/quickstart.py
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default()
    c.data.corpus = "stdlib"
    c.model.update(n_layer=4, d_model=128, n_head=4, d_head=32, d_inner=512)
    c.model.update(mem_len=128, dropout=0.0, unroll=4)
    c.train.update(num_steps=400, batch_size=16, tgt_len=128, eval_every=100)
    c.train.log_every = 1
    c.optim.update(lr=2e-3, warmup_steps=50)
    c.eval.update(tgt_len=128, mem_len=512, streams=8, yardsticks=True)
    c.generate.update(prompt="def ", num_tokens=400)
    c.checkpoint.every_steps = 100
    return c
