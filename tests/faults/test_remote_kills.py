"""Two processes train on gs:// despite kills, signals, outages and lost rights."""

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import Processes, write_experiment
from tests.support.store import Proxy, Store, let_pass, remote, shared_store, store

pytestmark = pytest.mark.long
FIXTURES = remote, shared_store, store
STEPS = 60
KILLS = int(os.environ.get("TXL_JAX_KILLS", 50))


class Pair:
    """Starts one run of two processes, each with its own proxy."""

    def __init__(self, store: Store, folder: Path, workdir: str):
        self.store, self.folder, self.workdir = store, folder, workdir
        self.proxies = [Proxy(store.port), Proxy(store.port)]
        self.flags = [f"--config={write_experiment(folder)}"]
        self.flags += [f"--config.train.num_steps={STEPS}"]
        self.flags += ["--config.train.eval_every=30", "--config.optim.optimizer=adam"]
        self.flags += ["--config.checkpoint.every_steps=10"]

    def start(self, *more: str, workdir: str = "", count: int = 2) -> Processes:
        """Starts the processes, undisturbed; `more` flags replace the others."""
        for proxy in self.proxies:
            proxy.hook, proxy.calls = let_pass, []
        environments = [proxy.environment() for proxy in self.proxies]
        all_flags = *self.flags, f"--workdir={workdir or self.workdir}", *more
        flags = {flag.partition("=")[0]: flag for flag in all_flags}.values()
        return Processes(self.folder, *flags, count=count, environments=environments)

    def result(self, workdir: str = "") -> dict[str, Any]:
        """Returns metrics and the last checkpoints, which must not depend on kills."""
        workdir = workdir or self.workdir
        lines = self.store.read(f"{workdir}/metrics.jsonl").splitlines()
        rows = [json.loads(line) for line in lines]
        last = f"{workdir}/checkpoints/{STEPS}/record/metadata"
        return {
            "exact": [(row["step"], row["exact"]) for row in rows],
            "record": json.loads(self.store.read(last)),
            "saved": self.store.saved(workdir)[-2:],  # a kill may leave one more
        }


@pytest.fixture
def pair(store: Store, tmp_path: Path, remote: str) -> Iterator[Pair]:
    pair = Pair(store, tmp_path, remote)
    yield pair
    for proxy in pair.proxies:
        proxy.close()


def kill_at(run: Processes, proxy: Proxy, index: int, deadly: int) -> None:
    """Kills process `index` at its storage call number `deadly`."""

    def hook(method: str, path: str) -> int | None:
        if len(proxy.calls) >= deadly:
            run.all[index].send_signal(signal.SIGKILL)
            return 0
        return None

    proxy.hook = hook


@pytest.mark.promise("Resume is exact")
def test_kills_at_random_storage_calls_change_no_bit(pair: Pair) -> None:
    straight = f"{pair.workdir}-straight"
    assert pair.start(workdir=straight).wait() == [0, 0]
    expected = pair.result(straight)
    steps = [step for step, x in expected["exact"] if "loss" in x]
    assert steps == list(range(1, STEPS + 1))
    calls = [len(proxy.calls) for proxy in pair.proxies]
    rng, kills, rounds = random.Random(0), 0, 0
    while kills < KILLS:
        pair.workdir = f"{straight}-{rounds}"
        for _ in range(min(5, KILLS - kills)):
            run, index = pair.start(), rng.randrange(2)
            deadly = rng.randrange(1, calls[index])
            kill_at(run, pair.proxies[index], index, deadly)
            statuses = run.wait()
            if statuses[index] != -signal.SIGKILL:
                break  # it ended before
            # The other notices the death at once, or is aborted by jax.
            assert statuses[1 - index] in (75, -signal.SIGABRT, 0), run.said(1 - index)
            kills += 1
        run = pair.start()
        assert run.wait() == [0, 0], run.said(0) + run.said(1)
        assert pair.result() == expected, f"round {rounds}, after {kills} kills"
        rounds += 1
        print(f"{kills} kills in {rounds} rounds changed no bit")


@pytest.mark.parametrize("index", [0, 1])
def test_a_death_in_the_last_save(pair: Pair, index: int) -> None:
    """Both processes then read what the next start saves in the same folder."""
    run = pair.start()

    def hook(method: str, path: str) -> int | None:
        ours = f"checkpoints%2F{STEPS}" in path or f"checkpoints/{STEPS}" in path
        if method == "POST" and ours:
            run.all[index].send_signal(signal.SIGKILL)
            return 0
        return None

    pair.proxies[index].hook = hook
    statuses = run.wait()
    assert statuses[index] == -signal.SIGKILL
    assert statuses[1 - index] in (75, -signal.SIGABRT), run.said(1 - index)
    again = pair.start()
    assert again.wait() == [0, 0], again.said(0) + again.said(1)


def test_a_signal_and_a_resume_on_another_number_of_processes(pair: Pair) -> None:
    run = pair.start("--config.train.num_steps=100000")
    run.until(lambda: len(pair.store.saved(pair.workdir)) > 1)
    run.all[1].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    step = max(pair.store.saved(pair.workdir))
    assert f"ended at update {step}, which is saved" in run.said(0)[0]
    lines = pair.store.read(f"{pair.workdir}/metrics.jsonl").splitlines()
    assert json.loads(lines[-1])["step"] == step
    last = step // 10 * 10 + 20
    more = [f"--config.train.num_steps={last}", f"--config.train.eval_every={last}"]
    alone = pair.start(*more, count=1)
    assert alone.wait() == [0]
    said = alone.stderr[0].read_text()
    assert f"resumed at update {step}" in said
    assert "process_count was 2, is now 1" in said
    assert max(pair.store.saved(pair.workdir)) == last


@pytest.mark.parametrize("status", [0, 403], ids=["gone", "without rights"])
def test_a_store_that_fails_for_a_while(pair: Pair, status: int) -> None:
    """Training continues meanwhile, and a later checkpoint is saved."""
    run = pair.start("--config.train.num_steps=100000")
    run.until(lambda: len(pair.store.saved(pair.workdir)) > 1)
    for proxy in pair.proxies:
        proxy.hook = lambda method, path: (
            status if method == "POST" or not status else None
        )
    run.until(has_said(run, "COULD NOT BE SAVED"))
    before = max(pair.store.saved(pair.workdir))
    for proxy in pair.proxies:
        proxy.hook = let_pass
    run.until(lambda: max(pair.store.saved(pair.workdir)) > before + 10)
    run.all[0].send_signal(signal.SIGTERM)
    assert run.wait() == [75, 75]
    last = max(pair.store.saved(pair.workdir)) + 10
    assert pair.start(f"--config.train.num_steps={last}").wait() == [0, 0]


def has_said(run: Processes, words: str) -> Callable[[], bool]:
    """Returns a check of the first process's stderr."""
    return lambda: words in run.stderr[0].read_text()


def kind(call: str) -> str:
    """Returns the kind of a call, by which the store's prices differ."""
    method, _, path = call.partition(" ")
    address = path.partition("?")[0]
    if method != "GET":
        return "delete" if method == "DELETE" else "write"
    return "list" if address.endswith("/o") else "read"


def test_the_storage_calls_of_a_checkpoint_and_of_a_start(pair: Pair) -> None:
    """They are bounded: each process reads and writes only its own part of arrays."""
    names = "read", "list", "write", "delete"

    def count(start: int = 0) -> list[list[int]]:
        counts = [Counter(map(kind, proxy.calls[start:])) for proxy in pair.proxies]
        return [[each[name] for name in names] for each in counts]

    def train(workdir: str, every: int) -> Any:
        flags = (
            f"--config.checkpoint.every_steps={every}",
            "--config.train.eval_every=60",
        )
        assert pair.start(*flags, workdir=workdir).wait() == [0, 0]
        return np.array(count())

    rows = {
        "a checkpoint": (train(f"{pair.workdir}-a", 10) - train(pair.workdir, 60)) / 5
    }
    for word in ("resumed at update", "fresh run"):
        workdir = pair.workdir + ("" if word.startswith("resumed") else "-b")
        run = pair.start("--config.train.num_steps=100000", workdir=workdir)
        run.until(has_said(run, word))
        rows[word] = np.array(count())
        run.kill()
    for name, row in rows.items():
        print(f"{name}, {names} of each process: {row.tolist()}")
    assert rows["a checkpoint"].sum(1).max() < 400
    assert rows["resumed at update"].sum(1).max() < 300
