"""The configs of the runs of a table's rows, and the evaluations that score them."""

import dataclasses

from ml_collections import ConfigDict

from txl_jax import config
from txl_jax.config import Config
from txl_jax.evaluate.options import EvalConfig
from txl_jax.paper.options import TableConfig

# Attention lengths, as multiples of that of training: the paper's are 120 and 260
# tokens for 128, and 500 for 256.
MULTIPLES = (0.5, 0.75, 1, 1.5, 2, 2.5)

# The miniature has an eighth of the published lengths and two sevenths of the layers.
SHORTER = 8
LENGTHS = {
    "model": ("mem_len", "n_position"),
    "train": ("tgt_len",),
    "eval": ("tgt_len", "mem_len", "ext_len"),
    "generate": ("mem_len",),
}
FEWER = 2 / 7
STEPS = 4_800
SCORED = 100_000  # tokens from the start of the split


def row_config(
    name: str, table: TableConfig, overrides: dict[str, str], number: int = 0
) -> Config:
    """Returns the config of one run of a row, with its seed and all overrides."""
    c = config.load(name)
    if table.scale == "full":
        return finish(c, overrides, number)
    shrink(c)
    row = finish(c, overrides, number, most_warmup=200)
    # No other position is clamped.
    if row.model.position == "transformer_xl" and "eval.clamp_len" not in overrides:
        row = config.with_fields(row, "eval", clamp_len=init_len(row) - 1)
    return dataclasses.replace(row, eval=attend(row, init_len(row)))


def finish(
    c: ConfigDict, overrides: dict[str, str], number: int, most_warmup: int = 0
) -> Config:
    """Returns a run's config; most_warmup: of a miniature, validated at the end."""
    c.train.seed += number
    if most_warmup:
        if steps := overrides.get("train.num_steps"):
            config.override(c, "train.num_steps", steps)
        steps = c.train.num_steps
        c.train.eval_every = steps
        c.optim.warmup_steps = min(most_warmup, steps // 10)
        c.checkpoint.update(every_steps=max(steps // 16 * 4, 4), keep=1)
    for field, text in overrides.items():
        config.override(c, field, text)
    return config.parse(c)


def shrink(c: ConfigDict) -> None:
    """Shrinks sizes, and the optimizer, to train in minutes on a CPU core."""
    for section, names in LENGTHS.items():
        c[section].update({name: c[section][name] // SHORTER for name in names})
    c.model.n_layer = round(c.model.n_layer * FEWER)
    c.model.update(d_model=64, d_embed=0, n_head=2, d_head=32, d_inner=256)
    # An adaptive softmax does not help with 256 bytes.
    c.model.update(cutoffs=(), div_val=1, tie_projs=(), dropout=0.0, dropatt=0.0)
    c.model.unroll = c.model.n_layer
    c.data.update(corpus="stdlib", vocab="byte", convention="")
    c.train.update(batch_size=32, segments_per_call=4, num_steps=STEPS, log_every=100)
    c.optim.update(optimizer="muon", lr=5e-3, schedule="cosine", min_lr_ratio=0.0)
    c.eval.update(streams=64, max_tokens=SCORED, clamp_len=0)


def init_len(row: Config) -> int:
    """Returns the attention length of training, M + L for a segment's last token."""
    return row.model.mem_len + row.train.tgt_len


def lengths(row: Config) -> list[int]:
    """Returns a row's attention lengths, in tokens, up to its learned positions."""
    tried = {int(multiple * init_len(row)) for multiple in MULTIPLES}
    # A window holds the scored part of a segment.
    least = 0 if row.model.mem_len else scored_part(row)
    most = row.model.n_position if row.model.position == "learned" else max(tried)
    return sorted(length for length in tried if least <= length <= most)


def scored_part(row: Config) -> int:
    """Returns the tokens that a window scores, half of a segment."""
    return max(row.train.tgt_len // 2, 1)


def attend(row: Config, length: int) -> EvalConfig:
    """Returns an evaluation that attends to `length` tokens.

    With a memory, every token sees `length` tokens. Without one, a window of `length`
    tokens is read for each half of a segment, as in the published evaluation.
    """
    L, M, before = row.train.tgt_len, length, 0
    if not row.model.mem_len:
        L, M, before = scored_part(row), 0, length - scored_part(row)
    return dataclasses.replace(
        row.eval, tgt_len=L, mem_len=M, ext_len=before, same_length=M > 0
    )
