"""A run of an older version is evaluated and resumed by this one."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.trained import command

pytestmark = pytest.mark.long

# Trained by revision 5b8fafa, whose config had other fields and which had other files:
# 4 updates of a tiny model, the text, and the experiment's file.
OLDER = Path(__file__).parent / "older.zip"


def test_a_run_of_an_older_version_is_evaluated_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.unpack_archive(OLDER, tmp_path)
    monkeypatch.chdir(tmp_path)  # data.path and data.data_dir are relative
    before = json.loads(Path("run/result.json").read_text("utf-8"))
    lines = Path("run/metrics.jsonl").read_text("utf-8").splitlines()

    result = command("--mode=evaluate", "--workdir=run").result
    assert result["step"] == before["step"] and result["tokens"] == before["tokens"]
    assert result["nll"] == pytest.approx(before["nll"], rel=1e-6)

    done = command("--workdir=run", "--config.train.num_steps=6")
    assert "resumed at update 4 from" in done.err
    assert done.result["updates"] == 6 and not done.result["failed_saves"]
    after = Path("run/metrics.jsonl").read_text("utf-8").splitlines()
    assert after[:4] == lines and len(after) == 6
