"""--quick makes a command a trial, but never replaces a value that a flag gives."""

import pytest

from tests.support.refusal import refused
from txl_jax.cli import flags
from txl_jax.config import FIELDS


def test_every_value_has_an_effect_in_its_mode() -> None:
    for mode, each in flags.MODES.items():
        for name in each.quick or {}:
            assert mode in FIELDS[name].modes


def test_flags_take_precedence() -> None:
    argv = ["train", "--config=quickstart", "--quick", "--config.train.num_steps=7"]
    config = flags.parse(argv).config
    assert (config.train.num_steps, config.eval.max_tokens) == (7, 4000)
    assert not config.eval.baselines
    plain = flags.parse(argv[:2]).config
    assert plain.train.num_steps == 1800 and plain.eval.baselines


@pytest.mark.parametrize("mode", ["prepare", "speed"])
def test_it_is_refused_where_it_means_nothing(mode: str) -> None:
    with refused(f"--quick is for the modes train, .*, not {mode}"):
        flags.parse([mode, "--config=quickstart", "--quick"])
