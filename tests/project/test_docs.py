"""Files, flags and fields that the documentation names exist.

`sphinx-build -W`, a job of the workflow, checks pages, pictures and links.
"""

import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from txl_jax import config, errors
from txl_jax.cli import flags
from txl_jax.data.vocab import FROM_JSON
from txl_jax.paper.memory_table import judge
from txl_jax.workdir.release_file import packaged

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
    """Returns the arguments of this project's program, or [] for other commands."""
    match = OURS.search(line)
    if not match:
        return []
    ours = re.sub(r"\$\(seq .*?\)", "8,16", match[1] or match[2])
    words = shlex.split(re.split(r"\s(?:&&|\||>)|;", ours)[0])
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
    """The runs, models and experiments that the reader has made are in place."""
    monkeypatch.chdir(checkout)
    # A bucket is a folder here.
    monkeypatch.setattr("txl_jax.cli.flags.find_workdir", Path)
    args = arguments(line)
    quickstart = ROOT / "experiments/quickstart.py"
    for flag, _, value in (each.partition("=") for each in args):
        path = Path(value)
        if flag == "--workdir" and "--mode=import" not in args:
            if not path.is_absolute() and not (path / "config.json").exists():
                path.mkdir(parents=True)
                fields = config.to_json(config.load(str(quickstart)))
                (path / "config.json").write_text(json.dumps(fields))
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
        inside = module.removeprefix("txl_jax.")  # setup.py maps experiments/
        name = inside if inside.startswith("experiments.") else module
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


# Flags and fields named in the text.

# Endings of names that begin like a section but are files or functions.
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
    assert named - files - IN_PYTHON <= config.FIELDS.keys()
    for path in PATHS.findall(TEXTS[name]):
        assert (ROOT / path).exists(), path
    for block in blocks(TEXTS[name], "python"):
        compile(block, name, "exec")
    # Only the site would fill in a link without a text.
    assert "[](" not in prose(TEXTS[name])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Returns a function that maps "module.function" to the text it makes."""
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


def log(name: str) -> Any:
    """Returns a committed result."""
    return json.loads((ROOT / "experiments/logs" / name).read_text("utf-8"))


SEEDS = 1111, 1112, 1113


def stated() -> Iterator[tuple[str, str]]:
    """Yields (page, text that states a committed number)."""
    runs = [log(f"wikitext2_seed_{seed}.json") for seed in SEEDS]
    minutes = [round(run["train_seconds"] / 60) for run in runs]
    mean, cached = (
        statistics.fmean(log(f"wikitext2_{x}_{seed}.json")["ppl"] for seed in SEEDS)
        for x in ("seed", "cache")
    )
    ppl = log("wikitext2_test.json")["ppl"]
    yield "docs/models.md", f"| {ppl:.2f} perplexity on test |"
    yield "docs/models.md", "{}, {} (beside other work) and {} mi".format(*minutes)
    yield "README.md", f"test perplexity of {mean:.1f} "
    yield "README.md", f"of {cached:.1f} with a continuous cache"
    quickstart = log("quickstart.json")
    bits = {**quickstart["baselines_bpc"], "this model": quickstart["bpc"]}
    for name, bpc in bits.items():
        yield "README.md", f"{name}: {bpc:.3f} bits/token on test"
    row, page = log("speed.json")["rows"][-1], "docs/long_context.md"
    for ratio in (row["ratio"], row["fair_ratio"], row["predicted_fair_ratio"]):
        yield page, f"{ratio:,.0f}"
    yield page, f"`cost_nats` ({log('cold_start.json')['cost_nats']:.1f})"
    nats = {
        kind: row["nll"]["mean"]
        for kind, row in log("memories.json")["rows_by_task"]["stdlib"].items()
    }
    lost = nats["fewer_streams"] - nats["paper"]
    yield "docs/tried.md", f"costs {lost:.2f} nats"
    yield from recall_stated(log("memories.json"))
    accuracies, page = log("classification.json"), "docs/tutorial/sequences.md"
    for row in ("tfidf", "frozen", "fine_tuned"):
        yield page, " | ".join(f"{100 * x:.0f} %" for x in accuracies[row])
    chain, page = log("rl_gymnax.json"), "docs/tutorial/reinforcement_learning.md"
    yield page, f"ends after {chain['updates']} updates"
    yield page, f"the best policy returns {chain['best_return']:.2f}"
    bits = log("music.json")["bpc"]
    yield "docs/tutorial/sequences.md", f"reaches {bits:.2f} bits per token"
    page = "docs/howto/compress.md"
    for size, direction in itertools.product((1, 3), ("encode", "decode")):
        packed = log(f"compress_{size}mb_{direction}.json")
        shown = f"{packed['bits_per_byte']:.3f} bits per byte"
        yield page, f"| {packed['compressed_bytes']:,} bytes ({shown}) |"
        yield page, f"| {packed['seconds']:,.0f} s on "
    lines = (ROOT / "experiments/benchmarks/results.jsonl").read_text("utf-8")
    for result in map(json.loads, lines.splitlines()):
        for case in result["cases"] if "--alone" in result["command"] else ():
            rates = [case["sides"][n]["tokens_per_second"] for n in ("ours", "alone")]
            cells = *(f"{rate:,.0f}" for rate in rates), f"{case['ratio']:.2f}"
            yield "docs/segments.md", f" | {' | '.join(cells)} |"
        if result["benchmark"] == "generation":
            shares = [f"{100 * case['of_the_bound']:.0f}" for case in result["cases"]]
            yield "docs/speed.md", f"reaches {' and '.join(shares)} % of the bandwidth"


def recall_stated(table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what is said of recall from beyond the reach."""
    page, tasks = "docs/tried.md", table["rows_by_task"]
    right = [
        share
        for cell in table["cells"]
        if cell["kind"] == "fast_weights"
        for share in cell.get("accuracies", {}).values()
    ]
    yield (
        "README.md",
        f"answer at least {math.floor(100 * min(right))} % from 48 to 768",
    )
    rows = tasks["recall_96"]
    more = rows["fast_weights"]["parameters"] / rows["paper"]["parameters"] - 1
    state = [f"{rows[x]['state_bytes'] / 2**10:.0f}" for x in ("fast_weights", "paper")]
    yield page, f"{100 * more:.1f} % more parameters and keep "
    yield page, " KiB per stream instead of ".join(state)
    by_speed = sorted(rows, key=lambda x: -rows[x]["tokens_per_second"])
    yield page, ", ".join(f"`{kind}`" for kind in by_speed)
    assert [
        {kind for kind, row in tasks[task].items() if row.get("verdict") == "better"}
        for task in ("stdlib", "wikitext2")
    ] == [{"fast_weights", "cache"}, {"cache"}]
    nats = {kind: row["nll"]["mean"] for kind, row in tasks["stdlib"].items()}
    gain = nats["paper"] - nats["fast_weights"]
    yield page, f"Fast weights gain {gain:.3f} nats on bytes"
    kinds = "fast_weights", "longer"
    runs = {(x["task"], x["kind"], x["seed"]): x["nll"] for x in table["cells"]}
    for task, verdict in (("stdlib", "no difference"), ("wikitext2", "better")):
        pairs = [[runs[task, kind, seed] for kind in kinds] for seed in range(3)]
        assert judge([x - y for x, y in pairs]) == verdict
    yield page, "exceeds its spread on words alone"
    far = [
        x["accuracy"]
        for x in table["cells"]
        if (x["task"], x["kind"]) == ("copying_192", "fast_weights")
    ]
    assert sum(share > 0.15 for share in far) == 1  # "one seed"
    lines = (ROOT / "experiments/logs/documents.jsonl").read_text("utf-8")
    documents = [json.loads(line) for line in lines.splitlines()]
    plain, fast = (
        np.array([run["nll"] for run in documents if run["fast_weights"] is own])
        for own in (False, True)
    )
    gains = plain - fast
    manual, mean = "docs/howto/memories.md", gains.mean()
    yield manual, f"they gain {mean:.3f} nats per byte of the standard library"
    yield manual, f"({gains.min():.3f} to {gains.max():.3f}, three seeds, "
    near = 100 * tasks["recall"]["paper"]["accuracy"]
    yield page, f"`paper` gives {near:.0f} % of the answers of `recall`"
    shares = [
        x["accuracy"]
        for x in table["cells"]
        if x["task"] == "copying_96" and x["kind"] != "gradients" and "accuracy" in x
    ]
    yield page, f"copies more than {math.ceil(100 * max(shares))} % from 96"


def test_pages_state_the_committed_numbers() -> None:
    """The committed benchmarks contain the README's rates."""
    for name, text in stated():
        page = " ".join((ROOT / name).read_text("utf-8").split())
        assert text in page, (name, text)
    lines = (ROOT / "experiments/benchmarks/results.jsonl").read_text("utf-8")
    committed = [
        [case["sides"][x + kind]["tokens_per_second"] for x in ("ours", "peer")]
        for line in map(json.loads, lines.splitlines())
        for case in line["cases"]
        for kind in ("", ", float32", ", bfloat16")
        if {f"ours{kind}", f"peer{kind}"} <= {*case["sides"]}
    ]
    number = r"([\d,.]+) tokens/s"
    readme = (ROOT / "README.md").read_text("utf-8")
    rows = re.findall(rf"\| {number} \| {number} \| ([\d.]+) \|", readme)
    assert len(rows) >= 3
    for ours, peer, ratio in rows:
        rates = [float(each.replace(",", "")) for each in (ours, peer)]
        near = [x for x in committed if np.abs(np.subtract(x, rates)).max() < 1]
        assert ratio in [f"{x / y:.1f}" for x, y in near], (ours, peer, ratio)


def test_statuses_and_vocabularies_are_those_of_the_code() -> None:
    statuses = (0, errors.USER_ERROR, errors.RETRY, errors.BAD_NUMBERS)
    for status in (*statuses, errors.INTERRUPTED):
        assert f"\n| {status} | " in TEXTS["howto/resume.md"]
    for kind in FROM_JSON:
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
