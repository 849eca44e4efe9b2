"""Benchmarks start, alternate, and report nothing on a loaded machine."""

import itertools
import json
import os

import pytest

from experiments.benchmarks import compare, pods_page, quiet, tpu_step_page
from experiments.benchmarks.quiet import LoadedError, Watch
from tests.project.conftest import Start
from tests.project.test_programs import PROGRAMS

FLAGS = {
    "attention": "--shapes 2x8x512+512x64 1x2x3+4x5 --kernels xla --dropatt=0.1",
    "compile_time": "--kernels chunked",
    "evaluation": "--tokens=160",
    "generation": "--memories 512",
    "softmax": "--tokens=160",
    "step": "--kernel=chunked --models small --updates=1",
}


def make_watch(*rates: float, force: bool = False, load: float = 0.5) -> Watch:
    """Returns a watch of a library whose product runs at these rates in sequence."""
    remaining = iter(rates)
    return Watch(force, {"jax": lambda: next(remaining)}, lambda: load)


def test_flags_of_every_comparison_are_tested() -> None:
    compared = {name.partition(",")[0] for name in compare.PROGRAMS}
    others = {"compare", "input", "tpu_estimate", "tpu_step", "pods"}
    programs = {name.partition(".")[2] for name in PROGRAMS if "benchmarks" in name}
    assert compared == set(FLAGS) == programs - others


@pytest.mark.parametrize("name", FLAGS)
def test_a_loaded_machine_is_refused(
    name: str,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    with pytest.raises(SystemExit) as exit:
        start(f"benchmarks.{name}", f"{FLAGS[name]} --tiny --repeats=1")
    assert exit.value.code == 2
    out, err = capsys.readouterr()
    message = f"{name}: not measured: the load average is 1.50, above 1.0 (--force)\n"
    assert (out, err) == ("", message)


def test_a_forced_report_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    monkeypatch.setattr(quiet, "matmul_rates", lambda: {"jax": lambda: 100.0})
    start("benchmarks.attention", "--tiny --force --repeats=2")
    result = json.loads(capsys.readouterr().out)
    assert result["loaded"] and result["load_average"] == 1.5
    assert result["command"].endswith("attention --tiny --force --repeats=2")
    (case,) = result["cases"]
    for side in case["sides"].values():
        assert len(side["seconds"]) == 2 and side["temporary_bytes"] > 0
    rows = compare.table_rows("attention", result)
    assert len(rows) == 2 and all("(loaded)" in row for row in rows)
    assert {row.count("|") for row in rows} == {compare.HEADER.count("|")}


def turns(watch: Watch, repeats: int) -> list[float]:
    """Returns the turns that count, as numbered by a fake clock."""
    counter = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quiet, "clock", lambda call: next(counter))
        return quiet.alternate({"a": lambda: None}, repeats, watch)["a"].seconds


def test_turns_next_to_a_slow_product_are_repeated() -> None:
    watch = make_watch(100, 79, 100, 81, 100)
    # The first call is number 0; the first two turns are next to the slow product.
    assert turns(watch, 2) == [3, 4]
    assert watch.describe()["turns_retaken"] == 2 and not watch.describe()["loaded"]
    # Later products show that the first rate was slow.
    watch = make_watch(79, 80, 100, 90)
    assert turns(watch, 2) == [2, 3]
    assert watch.describe()["turns_retaken"] == 1
    message = "4 of 4 turns do not count, .* 79.0 and at 100.0 GFLOP/s"
    with pytest.raises(LoadedError, match=message):
        turns(make_watch(100, *[79, 100] * 2), 1)


def test_force_continues_and_keeps_the_first_trouble() -> None:
    watch = make_watch(100, 100, 50, force=True, load=3.0)
    assert turns(watch, 2) == [1, 2]
    report = watch.describe()
    assert report["loaded"]
    assert report["trouble"].startswith("the load average is 3.00")
    assert report["matmul_gflops"]["jax"] == {"best": 100, "worst": 50, "spread": 0.5}
    watch = make_watch(100, 50, force=True)
    assert turns(watch, 1) == [1] and "50.0 and" in watch.describe()["trouble"]
    watch = make_watch(100, 90, 100, force=True)
    assert turns(watch, 2) == [1, 2] and not watch.describe()["loaded"]


def test_programs_alternate_with_a_product_before_each_turn() -> None:
    calls = ""

    def note(name: str) -> float:
        nonlocal calls
        calls += name
        return 1.0

    watch = Watch(False, {"jax": lambda: note("|")}, lambda: 0.0)
    programs = {name: (lambda name=name: note(name)) for name in "ab"}
    timings = quiet.alternate(programs, 3, watch)
    assert calls == "ab" + "|ab|ba|ab|"
    assert [len(timing.seconds) for timing in timings.values()] == [3, 3]


@pytest.mark.long
def test_all_benchmarks_work(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        start("benchmarks.compare", "--tiny --force --repeats=1")
    assert exit.value.code == 0
    out = capfd.readouterr().out
    assert all(f"| {name}" in out for name in compare.PROGRAMS)


def test_the_shares_of_a_step_add_up() -> None:
    row = {
        **{"experiment": "slow", "topology": "v5e:2x4", "fits": True},
        **{"devices": 8, "tokens": 80, "hbm_traffic_bytes": 4_000_000},
        "seconds": {"compute": 0.3, "hbm": 0.6, "interconnect": 0.1},
        "utilisation": {"full_overlap": 0.5, "no_overlap": 0.28},
        "hbm_traffic_by_scope": {"update": 3_000_000, "attention": 1_000_000},
    }
    better = row | {"experiment": "fast", "utilisation": {"no_overlap": 0.41}}
    head, _, line = pods_page.obstacles([row, better, row | {"fits": False}])
    assert "1 of 2 reach 40% of the peak: `fast` on v5e:2x4 (41%)" in head
    assert line == (
        "- `slow` on v5e:2x4: 28% products, 2% products made more than once, 10% the "
        "interconnect, 60% memory traffic, which is 0.40 MB a token (the update "
        "(gradients, moments, parameters) 75%, attention 25%)."
    )
    assert pods_page.obstacles([row | {"fits": False}]) == []


def test_the_page_of_tpu_steps_states_fit_missing_rows_and_ratio() -> None:
    row = {
        **{"part": "step", "experiment": "enwik8_24l", "chip": "v5e", "fits": True},
        **{"hbm_bytes": 3 * 2**30, "hbm_capacity_bytes": 4 * 2**30},
        **{"vmem_bytes": 2**20, "vmem_capacity_bytes": 2**27},
        **{"hbm_traffic_bytes": 5 * 10**9, "libtpu": "0.1", "date": "2026-11-21"},
        **{"kernel": "xla", "xla_cycles": 12_000_000, "kernel_cycles": 0},
        "xla_cycles_by_scope": {"update": 3_000_000, "attention": 1_000_000},
    }
    full = row | {"kernel": "chunked", "fits": False, "hbm_bytes": 5 * 2**30}
    ours = {"kernel": "tpu", "xla_cycles": 4_000_000, "kernel_cycles": 2_000_000}
    page = tpu_step_page.page([row, full, row | ours])
    first = "| `enwik8_24l` | v5e | "
    assert [line for line in page.splitlines() if line.startswith(first)][:3] == [
        f"{first}xla | 3.0 of 4.0 | 1 of 128 | 5.0 | 12.0 | 0.0 | 12.0 | 1.00 |",
        f"{first}chunked | out of memory, needs 5.0 GiB of 4.0 |  |  |  |  |  |  |",
        f"{first}tpu | 3.0 of 4.0 | 1 of 128 | 5.0 | 4.0 | 2.0 | 6.0 | 2.00 |",
    ]
    assert "`enwik8_24l` on v5e 2.00 (met)" in page
    assert "| `wt103_large` | v5p | tpu | not run |" in page
