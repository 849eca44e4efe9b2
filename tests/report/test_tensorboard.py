"""TensorBoard events can be read back, each step once, also after a resume."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tests.faults.test_disk import full_disk, lost_disk
from txl_jax.report.log import MetricsLog, read_metrics
from txl_jax.report.tensorboard import FOLDER, Events, write_sample


def read(path: Path) -> Iterator[Event]:
    """Yields the events of a file: length, checksum, event, checksum."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def shown(workdir: Path) -> dict[str, list[tuple[int, Any]]]:
    """Returns [(step, value)] per name, as TensorBoard would show them."""
    result: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted((workdir / FOLDER).iterdir()):
        first, *events = read(path)
        assert first.file_version == "brain.Event:2"
        for event in events:
            if event.session_log.status == SessionLog.START:
                for name in result:
                    result[name] = [x for x in result[name] if x[0] < event.step]
            for value in event.summary.value:
                text = value.tensor.string_val
                item = text[0].decode() if text else value.simple_value
                result.setdefault(value.tag, []).append((event.step, item))
    return result


def train(workdir: Path, last_step: int, steps: range, nll: float | None) -> None:
    with (
        Events(workdir, last_step) as events,
        MetricsLog(workdir / "metrics.jsonl", last_step, 20, 1, events.line) as log,
    ):
        for step in steps:
            loss = math.nan if step == 2 else 1 / step
            log.append([{"loss": loss, "tokens": 64, "skipped": step == 2}])
        log.sync(nll)


def test_each_step_is_shown_once_with_the_numbers_of_its_line(tmp_path: Path) -> None:
    """Steps 5 and 6 are lost by a kill; the validation of 4 comes after a resume."""
    train(tmp_path, 0, range(1, 7), None)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    train(tmp_path, 4, range(5, 5), 0.75)
    train(tmp_path, 4, range(5, 9), 0.5)
    assert len(list((tmp_path / FOLDER).iterdir())) == 3
    result = shown(tmp_path)
    assert [step for step, _ in result["exact/loss"]] == list(range(1, 9))
    for name in ("exact/loss", "exact/tokens", "timing/tokens_per_second"):
        group, _, key = name.partition("/")
        written = [
            line[group][key] for line in read_metrics(tmp_path / "metrics.jsonl")
        ]
        for (_, value), there in zip(result[name], written, strict=True):
            assert there is None or value == pytest.approx(there, rel=1e-6)
    assert math.isnan(result["exact/loss"][1][1])
    assert result["exact/skipped"][:3] == [(1, 0.0), (2, 1.0), (3, 0.0)]
    assert result["exact/valid_nll"] == [(4, 0.75), (8, 0.5)]
    assert "exact/reason" not in result, "words are no scalars"


def test_the_newest_sample_is_shown_as_it_stands(tmp_path: Path) -> None:
    write_sample(tmp_path, tmp_path, 5, "an older one")
    write_sample(tmp_path, tmp_path, 7, "def f():\n    # 1 < 2\n    pass")
    ((step, text),) = shown(tmp_path)["sample/text_summary"]
    assert (step, text) == (7, "    def f():\n        # 1 < 2\n        pass")


@pytest.mark.parametrize("trouble", ["full", "lost"])
def test_a_disk_that_takes_no_more_ends_the_file_and_not_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], trouble: str
) -> None:
    line = {"step": 1, "exact": {"loss": 1.0}}
    (tmp_path / FOLDER).mkdir()
    trouble_here = full_disk(200) if trouble == "full" else lost_disk(tmp_path / FOLDER)
    with trouble_here:
        with Events(tmp_path, 0) as events:
            for _ in range(300):
                events.line(line)
        reason = {"full": "File too large", "lost": "File exists"}[trouble]
        output = capfd.readouterr().err
    assert output == f"no more TensorBoard events until the next start ({reason})\n"
