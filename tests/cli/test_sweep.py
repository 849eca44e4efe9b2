"""The syntax of a sweep, and the shortest length that reaches the best perplexity."""

import pytest

from txl_jax import config
from txl_jax.cli.evaluate_split import compare
from txl_jax.evaluate.options import EvalConfig, Sweep, parse_sweep
from txl_jax.workdir.fit import warn_of_rotations


@pytest.mark.parametrize(
    "text, values",
    [
        ("mem_len=7,3,7", (3, 7)),
        ("clamp_len=0,400,20", (20, 400, 0)),
        ("same_length=true,false", (False, True)),
        ("cold_start=512", (512,)),
        ("dynamic_lr=3e-2,0,0.01", (0.0, 0.01, 0.03)),
        ("cache_weight=0.1,0.05", (0.05, 0.1)),
    ],
)
def test_sweeps_are_parsed(text: str, values: tuple[int, ...]) -> None:
    assert parse_sweep(text) == Sweep(text.partition("=")[0], values)


def test_no_memory_needs_no_same_length() -> None:
    config = EvalConfig(same_length=True)
    swept = parse_sweep("mem_len=0,8")
    assert not swept.at(config, 0).same_length
    longer = swept.at(config, 8)
    assert (longer.same_length, longer.mem_len) == (True, 8)


@pytest.mark.parametrize("section", ["eval", "generate"])
def test_far_rotations(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    c = config.load("quickstart")
    c.eval.tgt_len = c.train.tgt_len
    for c.model.position, length in (("rotary", 64), ("rotary", 65), ("alibi", 65)):
        c[section].mem_len = length
        warn_of_rotations(config.parse(c), section)
        warned = f"as in training are {section}.mem_len=64" in capsys.readouterr().err
        assert warned == (c.model.position == "rotary" and length > 64)
        warn_of_rotations(config.parse(c), section, most=64 + c.train.tgt_len)
        assert not capsys.readouterr().err


PPL = {0: 30.0, 100: 27.02, 200: 26.7749, 300: 26.7712, 400: 26.7701, 500: 26.9}


def test_the_columns_match_table_6() -> None:
    rows = [{"mem_len": at, "ppl": PPL[at]} for at in (0, 100, 200, 400)]
    result = compare("mem_len", rows, 100)
    # 26.7712 and 26.7701 are 26.77 in the table, 26.7749 too.
    columns = [result[key] for key in ("init", "ppl_init", "ppl_best", "shortest")]
    assert columns == [100, 27.02, 26.7701, 200] and result["rows"] == rows
