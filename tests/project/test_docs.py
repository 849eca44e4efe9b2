"""Files, flags and fields that the documentation names exist.

`sphinx-build -W`, a job of the workflow, checks pages, pictures and links.
"""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import subject
from txl_jax import config, errors
from txl_jax.cli import flags
from txl_jax.data.vocab import VOCABULARIES
from txl_jax.model.flops import needed_flops
from txl_jax.workdir.released import packaged

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
TEXTS = {page.relative_to(DOCS).as_posix(): page.read_text("utf-8") for page in PAGES}
TEXTS["launch/README.md"] = (ROOT / "launch/README.md").read_text("utf-8")
FENCES = re.compile(r"^(`{3,}|:{3,})(\S*)([^\n]*)\n(.*?)^\1[ \t]*$", re.M | re.S)


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return [body for _, kind, _, body in FENCES.findall(text) if kind == language]


def prose(text: str) -> str:
    """Returns a page without its fenced blocks."""
    return FENCES.sub("", text)


COMMANDS = [
    (name, line)
    for name, text in TEXTS.items()
    for block in blocks(text, "sh")
    for line in re.sub(r" \\\n *", " ", block).splitlines()
]
OURS = re.compile(r"(?:-m txl_jax\.main|(?<![\w./])txl)(?= )(.*)|launch/\S+.* -- (.*)")


def arguments(line: str) -> list[str]:
    """Returns the arguments of our program in a command, [] for other commands."""
    match = OURS.search(line)
    if not match:
        return []
    words = shlex.split(re.split(r"\s(?:&&|\||>)|;", match[1] or match[2])[0])
    return words[: words.index("#")] if "#" in words else words


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder like a checkout in which some experiments have been run."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("experiments", "txl_jax", "launch"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("name, line", [c for c in COMMANDS if arguments(c[1])])
def test_flags_of_commands_are_valid(
    name: str, line: str, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs, models and experiments that the reader has made exist."""
    monkeypatch.chdir(checkout)
    monkeypatch.setattr("txl_jax.cli.flags.find", Path)  # a bucket is a folder here
    args = arguments(line)
    quickstart = ROOT / "experiments/quickstart.py"
    for flag, _, value in (each.partition("=") for each in args):
        path = Path(value)
        if flag == "--workdir" and "--mode=import" not in args:
            if not path.is_absolute() and not (path / "config.json").exists():
                path.mkdir(parents=True)
                fields = config.parse(config.load(str(quickstart)))
                config.save_json(fields, path / "config.json")
        if flag == "--model" and value not in packaged():
            shutil.copy(packaged()["shakespeare"], path)
        if flag == "--config" and path.suffix == ".py" and not path.exists():
            shutil.copy(quickstart, path)
    flags.parse(args)


def test_modules_of_commands_exist() -> None:
    pattern = r"python3? -m ((?:experiments|txl_jax)[\w.]*)"
    modules = {x for text in TEXTS.values() for x in re.findall(pattern, text)}
    assert {"txl_jax.main", "experiments.benchmarks.compare"} <= modules
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


# Flags and fields named in the text.

FIELDS = {
    f"{section}.{name}"
    for section, fields in config.SECTIONS.items()
    for name in fields.__dataclass_fields__  # type: ignore[attr-defined]
}
# Names of files and functions that begin with a section.
FILES = tuple(".txt .html .log .npz .png .json .lock .py .pt .safetensors".split())
IN_PYTHON = {"generate.sample", "generate.stream", "generate.GenerateConfig"}
TREES = "txl_jax|experiments|tests|launch|figures"
PATHS = re.compile(rf"`((?:(?:{TREES})/)[\w./-]*)`")


@pytest.mark.parametrize("name", TEXTS)
def test_fields_and_files_exist_and_python_compiles(name: str) -> None:
    """`model.mem_len`, `--config.eval.streams=8`, `model.remat = true`."""
    code = re.findall(r"`([^`\n]+)`", prose(TEXTS[name]))
    sections = "|".join(config.SECTIONS)
    pattern = re.compile(rf"^(?:--config\.)?((?:{sections})\.[a-z_]\w*)(?= ?=|$)")
    named = {match[1] for text in code if (match := pattern.match(text))}
    files = {each for each in named if each.endswith(FILES)}
    assert named - files - IN_PYTHON <= FIELDS
    for path in PATHS.findall(TEXTS[name]):
        assert (ROOT / path).exists(), path
    for block in blocks(TEXTS[name], "python"):
        compile(block, name, "exec")
    # Only the site would fill a link without a text in.
    assert "[](" not in prose(TEXTS[name])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Returns a function from "module.function" to the text that it makes."""
    monkeypatch.syspath_prepend(DOCS)

    def make(name: str) -> str:
        name, *rest = name.split()
        module, _, function = name.rpartition(".")
        return getattr(import_module(f"generate.{module}"), function)(*rest)

    return make


def test_generated_parts_are_made(made: Callable[[str], str]) -> None:
    text = "\n".join(TEXTS.values())
    names = set(re.findall(r"^```\{made\} (.+)$", text, re.M))
    assert len(names) >= 10
    for name in names:
        assert made(name).strip(), name


def log(name: str) -> dict[str, Any]:
    """Returns a committed result."""
    return json.loads((ROOT / "experiments/logs" / name).read_text("utf-8"))


SEEDS = 1111, 1112, 1113


def test_pages_state_the_results_of_the_reference_model() -> None:
    path = ROOT / "experiments/logs/wikitext2.jsonl"
    lines = map(json.loads, path.read_text("utf-8").splitlines()[1:])
    valid = math.exp(min(line["valid_nats"] for line in lines))
    test = log("wikitext2_test.json")["ppl"]
    runs = [log(f"wikitext2_seed_{seed}.json") for seed in SEEDS]
    minutes = [round(run["train_seconds"] / 60) for run in runs]
    mean, cached = (
        statistics.fmean(log(f"wikitext2_{x}_{seed}.json")["ppl"] for seed in SEEDS)
        for x in ("seed", "cache")
    )
    for name, numbers in {
        "docs/models.md": (
            f"| {valid:.2f} |",
            f"| {test:.2f} perplexity on test |",
            "{}, {} (beside other work) and {} minutes".format(*minutes),
        ),
        "README.md": (
            f"test perplexity of {mean:.1f} ",
            f"of {cached:.1f} with a continuous cache",
        ),
        "experiments/wikitext2.py": (
            f"test perplexity of {mean:.1f}, with a continuous cache {cached:.1f} ",
        ),
    }.items():
        text = " ".join((ROOT / name).read_text("utf-8").split())
        for number in numbers:
            assert number in text, name


def test_the_readme_states_the_results_of_its_commands() -> None:
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    result = log("quickstart.json")
    for name, bpc in {**result["baselines_bpc"], "this model": result["bpc"]}.items():
        assert f"{name}: {bpc:.3f} bits per token on test" in readme
    path = ROOT / "experiments/logs/quickstart_dynamic.jsonl"
    static, dynamic = map(json.loads, path.read_text("utf-8").splitlines())
    assert "dynamic" not in static and dynamic["dynamic"] == "sgd"
    assert f"from {static['bpc']:.2f} bits each to {dynamic['bpc']:.2f};" in readme
    path = ROOT / "experiments/benchmarks/shakespeare.jsonl"
    nats = json.loads(path.read_text("utf-8"))["runs"][0]["ours"]["nats"]
    assert f"reaches {nats:.2f} nats per character" in readme


def test_pages_state_the_committed_speed_and_cost_of_a_cold_start() -> None:
    page = " ".join(TEXTS["long_context.md"].split())
    row = log("speed.json")["rows"][-1]
    for name in ("ratio", "fair_ratio"):
        assert f"{row[name]:,.0f}" in page
    for name in ("speed_1.json", "speed_2.json"):
        assert f"{log(name)['rows'][-1]['fair_ratio']:,.0f}" in page
    assert f"FLOPs predict {row['predicted_fair_ratio']:,.0f}" in page
    cost = f"{log('cold_start.json')['cost_nats']:.1f}"
    assert f"`cost_nats` ({cost})" in page


def test_pages_state_the_committed_speeds() -> None:
    lines = (ROOT / "experiments/benchmarks/results.jsonl").read_text("utf-8")
    results = [json.loads(line) for line in lines.splitlines()]
    page, stated = TEXTS["segments.md"], 0
    for result in results:
        for case in result["cases"] if "--alone" in result["command"] else ():
            rates = [case["sides"][n]["tokens_per_second"] for n in ("ours", "alone")]
            cells = *(f"{rate:,.0f}" for rate in rates), f"{case['ratio']:.2f}"
            assert f" | {' | '.join(cells)} |" in page
            stated += 1
            if case["case"].startswith("segment"):
                model = dataclasses.replace(
                    subject.ENWIK8, mem_len=2100, clamp_len=820, same_length=True
                )
                flops = needed_flops(model, 1, 80, training=False) / 80 / 1e9
                peak = result["matmul_gflops"]["jax"]["best"]
                one, other = (f"{100 * flops * rate / peak:.0f}" for rate in rates)
                assert f"{one} and {other} % of the cores' rate" in page
    assert stated == 4
    page = " ".join(TEXTS["speed.md"].split())
    (allocated,) = (x for x in results if "MALLOC_ARENA_MAX" in x["command"])
    (case,) = allocated["cases"]
    ours, peer = (case["sides"][n]["tokens_per_second"] for n in ("ours", "peer"))
    assert f"the port reaches {peer:.0f} tokens/s, and txl_jax {ours:.0f}." in page
    (generation,) = (x for x in results if x["benchmark"] == "generation")
    shares = [f"{100 * case['of_the_bound']:.0f}" for case in generation["cases"]]
    assert f"Generation reaches {' and '.join(shares)} % of the bandwidth" in page


def test_the_page_of_agents_states_the_committed_returns(
    made: Callable[[str], str],
) -> None:
    page = " ".join(TEXTS["tutorial/reinforcement_learning.md"].split())
    result = log("rl_mazes.json")
    cells = result["cells"]
    total = len(result["lengths"]) * len(result["agents"]) * len(result["seeds"])
    assert ("unfinished: " in made("runs.runs")) == (len(cells) < total)
    assert "**At 10 steps, all agents solve the maze with every seed.**" in page
    short = [cell for cell in cells if cell["length"] == 10]
    assert len(short) == 20 and all(cell["solved_after"] for cell in short)
    updates = {
        agent: sum(x["solved_after"] for x in short if x["agent"] == agent)
        for agent in result["agents"]
    }
    assert updates["Transformer-XL"] < min(updates["gated"], updates["GRU"])
    assert "**A solved maze can be lost again.**" in page
    lost = [x for x in cells if x["solved_after"] and x["return"] < 0.5]
    lost = [x for x in lost if (x["agent"], x["length"]) == ("Transformer-XL", 50)]
    low, high = sorted(x["return"] for x in lost)
    assert f"two fall back, to {high:.2f} and {low:.2f}" in page
    solved = [
        cell["solved_after"]
        for cell in cells
        if (cell["agent"], cell["length"]) == ("gradients across segments", 100)
    ]
    assert f"all seeds solve the maze, after {min(solved)} to {max(solved)} up" in page
    gru = [cell for cell in cells if (cell["agent"], cell["length"]) == ("GRU", 100)]
    assert gru and not any(cell["solved_after"] for cell in gru)
    assert "**At 200 steps, no agent learns**" in page
    assert not any(cell["solved_after"] for cell in cells if cell["length"] == 200)
    sizes = [cell["parameters"] for cell in cells]
    assert f"({min(sizes):,} to {max(sizes):,} parameters)" in page


def test_what_the_page_of_memories_says_of_them() -> None:
    text = (ROOT / "experiments/logs/memories.json").read_text("utf-8")
    tasks = json.loads(text)["rows_by_task"]
    nats = {kind: row["nll"]["mean"] for kind, row in tasks["stdlib"].items()}
    lost = nats["fewer_streams"] - nats["paper"]
    assert f"costs {lost:.2f} nats of the bytes" in TEXTS["howto/memories.md"]
    for task, best in (
        ("stdlib", "cache"),
        ("wikitext2", "cache"),
        ("copying_96", "gradients"),
        ("recall", "gradients"),
    ):
        rows = tasks[task].items()
        assert [kind for kind, row in rows if row.get("verdict") == "better"] == [best]


def test_a_result_of_one_seed_or_of_uncommitted_code_has_no_verdict(
    made: Callable[[str], str],
) -> None:
    rows = [line.split(" | ") for line in made("claims.claims").splitlines()[2:]]
    single = [row for row in rows if row[2] == "**1**"]
    assert len(rows) >= 15 and single
    assert all("no verdict" in row[1] for row in single)
    found = made("runs.runs").split("\n### ")
    assert len(found) >= 10
    assert all("seed" in each or "timed; " in each for each in found)
    assert not [each for each in found if "+dirty" in each]


def test_statuses_and_vocabularies_are_those_of_the_code() -> None:
    statuses = (0, errors.USER_ERROR, errors.RETRY, errors.BAD_NUMBERS)
    for status in (*statuses, errors.INTERRUPTED):
        assert f"\n| {status} | " in TEXTS["howto/resume.md"]
    for kind in VOCABULARIES:
        assert re.search(rf"`(--vocab=)?{kind}\b", TEXTS["howto/data.md"])


def test_guarantees_of_the_readme_and_marks_of_tests_agree(
    made: Callable[[str], str],
) -> None:
    promises = import_module("generate.promises")
    marked = {guarantee for guarantee, _ in promises.marked()}
    assert {*promises.guarantees()} == marked and len(marked) >= 5


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [p.stem for p in sorted((DOCS / "figures").glob("*.py"))]
)
def test_figures_can_be_drawn_again(script: str, tmp_path: Path) -> None:
    """The figures assert that they agree with the code."""
    copy = shutil.copytree(DOCS / "figures", tmp_path / "figures")
    (copy / f"{script}.svg").unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(copy / f"{script}.py")]
    subprocess.run(command, check=True, env=environment)
    assert (copy / f"{script}.svg").is_file() == (script != "style")
