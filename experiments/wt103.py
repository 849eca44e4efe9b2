"""The paper's standard model for WikiText-103 (Table 1): test perplexity 24.0.

    python -m txl_jax.main --config=wt103

Published: 24.0 (24.03 in the released code's README) with 151M parameters
(151,107,538 here); trained there on 4 GPUs of 11 GB; time unknown. This project has not
run it.

Model, optimizer and evaluation follow the released PyTorch code, run_wt103_base.sh;
segments_per_call and the sampling are this project's. The
TensorFlow script makes twice as many updates and gives each layer its own u and w. On 4
devices, eval.streams must be a multiple of 4, for example --config.eval.streams=12.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default(model=config.pytorch())
    c.model.update(n_layer=16, d_model=410, n_head=10, d_head=41, d_inner=2100)
    c.model.update(cutoffs=(20000, 40000, 200000), mem_len=150, dropout=0.1)
    c.data.corpus = "wikitext103"
    c.train.update(batch_size=60, tgt_len=150, num_steps=200_000, segments_per_call=4)
    c.optim.lr = 2.5e-4
    c.eval.update(streams=10, tgt_len=64, mem_len=640, clamp_len=400, same_length=True)
    c.generate.update(mem_len=640)
    return c
