"""The copying task: eight letters, a delay of noise, and the letters again.

    python -m txl_jax.experiments.recipes.tasks copying
    python -m txl_jax.main --config=copying

Not in the paper: 91,392 parameters learn in about a minute on 2 cores to repeat letters
from 32 tokens ago, twice their segment length, which only the memory can provide. Only
answers are trained on, and the sample shows one. The evaluation also scores the
unpredictable noise, so its loss is not meaningful.
`python -m txl_jax.experiments.figures.copying` counts right answers by delay and
memory.
"""

from ml_collections import ConfigDict

from txl_jax import config


def get_config() -> ConfigDict:
    c = config.default()
    c.data.update(corpus="text", path="tasks/copying-24-8-8")
    c.model.update(n_layer=2, d_model=64, n_head=2, d_head=32, d_inner=128)
    # With the usual 0.02, attention of so small a model stays uniform for long.
    c.model.update(mem_len=32, dropout=0.0, init_std=0.1)
    c.train.update(batch_size=32, tgt_len=16, segments_per_call=10)
    c.train.update(num_steps=400, eval_every=400, log_every=10)
    c.train.update(score_from=ord("a"))
    c.optim.update(lr=3e-3, warmup_steps=100)
    c.eval.update(streams=8, tgt_len=16, mem_len=32)
    prompt = "BADHEFGC" + 2 * "314159265358" + ">"
    c.generate.update(prompt=prompt, num_tokens=8, top_k=1, mem_len=32)
    c.checkpoint.update(every_steps=200, keep=1)
    return c
