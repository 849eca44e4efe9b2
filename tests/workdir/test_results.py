"""A saved measurement is reused for the same key only."""

import json
from pathlib import Path

from tests.support.refusal import refused
from txl_jax.runtime.storage import Json
from txl_jax.workdir.results import cached


def test_a_result_is_measured_once_for_each_key(tmp_path: Path) -> None:
    path, calls = tmp_path / "run" / "result.json", list[int]()

    def measure() -> Json:
        calls.append(1)
        return {"nll": (0.1, float("nan"))}

    expected = {"lengths": [1, 2], "nll": [0.1, None]}
    for _ in range(2):
        assert cached(path, {"lengths": (1, 2)}, measure) == expected
    assert len(calls) == 1 and json.loads(path.read_text()) == expected
    assert cached(path, {}, measure) == expected
    assert cached(path, {"lengths": (1, 3)}, measure)["lengths"] == [1, 3]
    assert len(calls) == 2
    for damaged in ("{", "{}"):
        path.write_text(damaged)
        with refused("result.json is damaged"):
            cached(path, {"lengths": [1, 3]}, measure)
