"""The paper's 12 layers for enwik8 (Table 2): 1.06 bits per character on test.

    python -m txl_jax.main --config=enwik8

Published: 1.06 with 41M parameters, here 41,055,436, on 4 GPUs of 11 GB; time unknown.
This project has not run it.

Every value is from the released PyTorch code, run_enwik8_base.sh, whose text has no
newlines (204 symbols); --config.data.convention=newlines_kept keeps them. Its 22
streams suit 4 unequal GPUs; on 4 devices use 24, as in the TensorFlow script, and a
multiple of 4 in evaluation, for example --config.eval.streams=12.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.pytorch())
    c.model.update(n_layer=12, d_model=512, n_head=8, d_head=64, d_inner=2048)
    c.model.update(mem_len=512, dropout=0.1)
    c.data.corpus = "enwik8"
    c.train.update(batch_size=22, tgt_len=512, num_steps=400_000, segments_per_call=4)
    c.optim.lr = 2.5e-4
    c.eval.update(streams=10, tgt_len=80, mem_len=2100, clamp_len=820, same_length=True)
    c.generate.update(prompt="The ", mem_len=2100)
    return c
