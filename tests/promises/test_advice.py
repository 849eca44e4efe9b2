"""The advice of an error's line works: a command that follows it succeeds.

The lines come from the tables of errors. Advice is what a line says of the value of a
field, of a flag or of a name; a line may give several pieces of it.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests import test_config
from tests.promises.test_bad_inputs import ERRORS, Inputs, expand, home, inputs
from tests.support.trained import command
from txl_jax import config as configs
from txl_jax.cli.flags import MODES
from txl_jax.config import FIELDS
from txl_jax.errors import UserError

pytestmark = pytest.mark.promise("User errors are one line")
FIXTURES = (home, inputs)

Values = dict[str, str]  # by field or flag
Change = dict[str, str | None]  # None = without it
FIELD = rf"\b({'|'.join(map(re.escape, FIELDS))})\b"
BEFORE = r"(?:(?<=\w | \()(?<!effect with )(?<!multiple of )|(?<!as in )--config\.)"
VALUE = r"""["']?(?!a |another |one |[A-Z])([\w/.,-]*\w)"""
STEPS = 4  # of advice that leads to other advice


def fields(text: str, value: str | None) -> Change:
    """Returns the value for each field that a text names."""
    return dict.fromkeys(re.findall(FIELD, text), value)


# Patterns of advice, and the values that follow it; `it` is the line's subject.
FOLLOWED: list[list[str]] = []
ADVICE: list[tuple[str, Callable[[re.Match[str], str], Change]]] = [
    (rf"{FIELD}=''", lambda m, it: {m[1]: ""}),
    (rf"{BEFORE}{FIELD}(?:=| = | to ){VALUE}", lambda m, it: {m[1]: m[2]}),
    (r"--(\w+)=(?![A-Z])(\S+)", lambda m, it: {f"{it.partition('.')[0]}.{m[1]}": m[2]}),
    (r"(?:it to|must be from|give|step of) (\d+|best)", lambda m, it: {it: m[1]}),
    (r"^\S+ = \S+ must be one of (\w+)", lambda m, it: {it: m[1]}),
    (r"multiple of (\d+)", lambda m, it: {it: str(2 * int(m[1]))}),
    (r"give one below (\d+)", lambda m, it: {it: str(int(m[1]) - 1)}),
    (r"(?:lower|decrease) (.*)", lambda m, it: fields(m[1], "1")),
    (r"raise (.*)", lambda m, it: fields(m[1], "2")),
    (r"leave it out", lambda m, it: {it: None}),
    (r"leave it empty", lambda m, it: {it: ""}),
    (r"leave out (.*)", lambda m, it: fields(m[1], None)),
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


def unhelpful(given: Values, refuse: Callable[[Values], str]) -> Iterator[str]:
    """Yields the lines to which advice leads that does not help."""
    line = refuse(given)
    for values in advised(line, given):
        after, lines = given, [line]
        while lines[-1] and values and len(lines) <= STEPS:
            new = {**after, **values}
            after = {x: y for x, y in new.items() if y is not None}
            lines.append(refuse(after))
            values = next(iter(advised(lines[-1], after)), {})
            if lines[-1] in lines[:-1]:
                break
        FOLLOWED.append(lines)
        if lines[-1]:
            yield " -> ".join([*lines, str(after)])


def test_the_advice_for_a_config() -> None:
    def refuse(values: Values) -> str:
        config = configs.default()
        try:
            for name, text in values.items():
                configs.override(config, name, text)
            configs.parse(config)
            return ""
        except UserError as error:
            return str(error)

    bad: list[str] = []
    for row in test_config.REFUSED.strip().splitlines():
        changes = row.format(**test_config.SHORT).split(" | ")[0]
        given = dict(each.split("=", 1) for each in changes.split())
        bad += unhelpful(given, refuse)
    assert not bad


def parse(argv: list[str]) -> Values:
    """Returns the fields and flags of a command line."""
    pairs = [each.partition("=")[::2] for each in argv if "=" in each]
    values = {name.removeprefix("--config."): text for name, text in pairs}
    section = MODES.get(values.get("--mode", "train"), MODES["train"]).section
    short = {f"--{x.partition('.')[2]}": x for x in FIELDS if x.startswith(section)}
    return {short.get(name, name): text for name, text in values.items()}


@pytest.mark.long
def test_the_advice_for_a_command(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs.path)
    quick = {"train.num_steps": "2", "train.eval_every": "2", "eval.max_tokens": "200"}

    def refuse(values: Values) -> str:
        if {"--config", "train.num_steps"} & values.keys():
            values = quick | values
        argv = [
            f"--config.{x}={y}" if x in FIELDS else f"{x}={y}"
            for x, y in values.items()
        ]
        done = command(*argv)
        for name in ("new", "another"):
            shutil.rmtree(inputs.path / name, ignore_errors=True)
        return done.err.splitlines()[-1] if done.status else ""

    bad: list[str] = []
    for row in filter(None, ERRORS.splitlines()):
        line, _, *forbidden = row.split(" | ")
        argv = expand(inputs.path, *shlex.split(line.format(**inputs.names)))
        if not forbidden:
            bad += unhelpful(parse(argv), refuse)
    assert not bad
