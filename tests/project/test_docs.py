"""Files, flags and fields that the documentation names exist.

`sphinx-build -W`, a job of the workflow, checks pages, pictures and links.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from txl_jax import config
from txl_jax.cli import flags
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


def test_links_and_pictures_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    paths = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


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
