"""A byte-level Transformer-XL on the standard library's sources, on a laptop's CPU.

    python -m txl_jax.main --config=quickstart

Not in the paper: 675,712 parameters read 1.8 million of the corpus's 10.8 million bytes
in one to two minutes on 2 cores. Expected: about 1.92 bits per byte on the test files,
below the order-2 and order-3 models of all the training bytes, and below gzip.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default()
    c.data.corpus = "stdlib"
    c.model.update(n_layer=3, d_model=128, n_head=2, d_head=64, d_inner=512)
    # Too short a run to overfit.
    c.model.update(mem_len=64, dropout=0.0, dtype="bfloat16")
    # Many short segments rather than few long ones: each update sees 32 places of the
    # corpus, and the memory brings back the context.
    c.train.update(batch_size=32, tgt_len=32, segments_per_call=4)
    c.train.update(num_steps=1800, eval_every=900, log_every=1)
    c.optim.update(optimizer="muon", lr=3e-3, warmup_steps=100)
    # A memory longer than in training does harm after so few updates.
    c.eval.update(streams=8, tgt_len=64, mem_len=64, baselines=True)
    c.generate.update(prompt="def ", num_tokens=500, temperature=0.9, mem_len=64)
    c.checkpoint.update(every_steps=450, keep=1)
    return c
