"""The advice in an error works: a command that follows it succeeds.

The errors are those of two tables. A piece of advice sets or leaves out fields and
flags; an error may have several, and lead to another error with advice.
"""

import re
import shlex
import shutil
from collections.abc import Callable

import pytest

from tests.promises.test_bad_inputs import ERRORS, Inputs, expand, home, inputs
from tests.support.trained import command
from tests.test_config import REFUSED, SHORT
from txl_jax.cli.flags import MODES
from txl_jax.config import FIELDS

FIXTURES = (home, inputs)

Values = dict[str, str]  # by field or flag
Change = dict[str, str | None]  # None = without it
FIELD = rf"\b({'|'.join(map(re.escape, FIELDS))})\b"
BEFORE = r"(?:(?<=\w |, | \()(?<!effect with )(?<!multiple of )|(?<!as in )--config\.)"
VALUE = r"""["']?(?!a |another |one |the |[A-Z])([\w/.,-]*\w)"""
NUMBER = (
    "(?:(?:it|one of them) to|it at|(?<!each )must be (?:from|at least)|give|step of)"
)
STEPS = 4
# Errors that only a network or another program's data would avoid.
ELSEWHERE = r"cannot download|'tfds:nothing'"


def each(text: str, value: str | None) -> Change:
    """Returns the value for each field that a text names."""
    return dict.fromkeys(re.findall(FIELD, text), value)


# Patterns of advice, and the values that follow it; `it` is the line's subject.
ADVICE: list[tuple[str, Callable[[re.Match[str], str], Change]]] = [
    (rf"{FIELD}=''", lambda m, it: {m[1]: ""}),
    (rf"{BEFORE}{FIELD}(?:=| = | to | at ){VALUE}", lambda m, it: {m[1]: m[2]}),
    (rf"{FIELD} to the vocab.json", lambda m, it: {m[1]: "run/vocab.json"}),
    (r"--(\w+)=(?![A-Z])(\S+)", lambda m, it: {f"{it.partition('.')[0]}.{m[1]}": m[2]}),
    (rf"{NUMBER} (-?\d+|best)", lambda m, it: {it: m[1]}),
    (rf"set {FIELD}(?! to|=| =)", lambda m, it: {m[1]: "8"}),
    (r"did you mean '(\w+)'", lambda m, it: {it: m[1]}),
    (r"must be one of (\w+)(?!.*did you mean '\w+')", lambda m, it: {it: m[1]}),
    (r"multiple of (?:\S+ = )?(\d+)", lambda m, it: {it: str(2 * int(m[1]))}),
    (r"give one below (\d+)", lambda m, it: {it: str(int(m[1]) - 1)}),
    (r"decrease it", lambda m, it: {it: "1"}),
    (r"(?:lower|decrease) (.*)", lambda m, it: each(m[1], "1")),
    (r"raise (.*)", lambda m, it: each(m[1], "2")),
    (r"leave it out", lambda m, it: {it: None}),
    (r"leave it empty", lambda m, it: {it: ""}),
    (r"leave out (.*)", lambda m, it: each(m[1], None)),
    (r"another --workdir", lambda m, it: {"--workdir": "another"}),
    (r"--config to start one|--config=FILE", lambda m, it: {"--config": "tiny.py"}),
]


def advised(line: str, given: Values) -> list[Change]:
    """Returns the pieces of advice in the last clause of a line.

    The line's subject is the field that it names first, if need be without a section.
    """
    if given.get("eval.sweep", "").startswith("cold_start"):
        line = line.replace("a sweep over", "eval.sweep of")
    line = line.replace(r"$'\n'", "\n")
    if given.get("--mode", "train") != "train":
        line = line.replace("give another --workdir", "")
    keys = "|".join(re.escape(name.partition(".")[2] or name) for name in given)
    named = re.search(rf"{FIELD}|(?<![.\w])(?:{keys})\b", line)
    ends = (x for x in given if named and x.endswith(named[0]))
    subject = named[1] or next(ends, "") if named else ""
    *problem, fix = re.split(r"[:;] (?=[a-z])", line)
    pieces = [
        {name: value for name, value in follow(match, subject).items() if name}
        for pattern, follow in ADVICE
        for match in re.finditer(pattern, fix if problem else line)
    ]
    if " and " in fix:  # they belong together
        pieces = [{x: y for piece in pieces for x, y in piece.items()}]
    return list(filter(None, pieces))


def parse(argv: list[str]) -> Values:
    """Returns the fields and flags of a command line."""
    pairs = [word.partition("=")[::2] for word in argv if "=" in word]
    values = {name.removeprefix("--config."): text for name, text in pairs}
    section = MODES.get(values.get("--mode", "train"), MODES["train"]).section
    short = {f"--{x.partition('.')[2]}": x for x in FIELDS if x.startswith(section)}
    return {short.get(name, name): text for name, text in values.items()}


def refuse(values: Values) -> str:
    """Returns the error of a short run of a command, or ""."""
    if {"--config", "train.num_steps"} & values.keys():
        quick = {"train.num_steps": "2", "train.eval_every": "2"}
        values = {**quick, "eval.max_tokens": "200", **values}
    flags = [f"--config.{x}={y}" for x, y in values.items() if x in FIELDS]
    flags += [f"{x}={y}" for x, y in values.items() if x not in FIELDS]
    if "default.py" in values.get("--config", ""):
        flags.append("--print_config")
    done = command(*flags)
    for name in ("new", "another"):
        shutil.rmtree(name, ignore_errors=True)
    return done.err.splitlines()[-1].removeprefix("txl_jax: ") if done.status else ""


CHANGES = [x.format(**SHORT).split(" | ")[0] for x in REFUSED.strip().splitlines()]
CONFIGS = [
    " --config.".join(["config default.py", *changes.split()]) + " | "
    for changes in CHANGES
]


@pytest.mark.long
@pytest.mark.parametrize("row", [*CONFIGS, *filter(None, ERRORS.splitlines())])
def test_a_command_that_follows_advice_succeeds(
    row: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs.path)
    default = "from txl_jax.config import default as get_config\n"
    (inputs.path / "default.py").write_text(default)
    line, _, *forbidden = row.format(**inputs.names).split(" | ")
    given = parse(expand(inputs.path, *shlex.split(line)))
    pieces = [] if forbidden else advised(refuse(given), given)
    if not pieces:
        pytest.skip("no advice that a flag follows")
    for change in pieces:
        lines, after = [refuse(given)], given
        while lines[-1] and change and len(lines) <= STEPS:
            after = {x: y for x, y in {**after, **change}.items() if y is not None}
            lines.append(refuse(after))
            change = next(iter(advised(lines[-1], after)), {})
        assert not lines[-1] or re.search(ELSEWHERE, lines[-1]), (lines, after)
