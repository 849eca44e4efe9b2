"""A character-level Transformer-XL on tiny Shakespeare, in one or two hours on a CPU.

    python -m txl_jax.main --config=shakespeare_long

Not in the paper: 2,900,609 parameters, gated layers, normed queries and keys, and Muon.
Each of 8,000 updates reads 24 segments of 64 characters, in each epoch from other
places ("roll"), with a memory of 128: the plays are read twelve times. The evaluation
has the same lengths, because longer memories harm here. Expected: 1.462 nats (2.11
bits). For scale, nanoGPT's GPU recipe (10.7 million parameters, blocks of 256) reaches
1.4697, a mean over random blocks of the same text. The test split is the validation
split.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default()
    c.data.corpus = "shakespeare"
    c.model.update(n_layer=6, d_model=192, n_head=6, d_head=32, d_inner=768)
    c.model.update(feed_forward="swiglu", qk_norm=True)
    c.model.update(mem_len=128, dropout=0.15)
    c.train.update(batch_size=24, tgt_len=64, segments_per_call=4, order="roll")
    c.train.update(num_steps=8000, eval_every=500, log_every=20)
    c.optim.update(optimizer="muon", lr=3e-3, warmup_steps=200)
    c.eval.update(streams=8, tgt_len=64, mem_len=128)
    c.generate.update(num_tokens=500, temperature=0.8, mem_len=128)
    c.checkpoint.update(every_steps=500, keep=1)
    return c
