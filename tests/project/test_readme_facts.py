"""Every statement of the README has a test, a file or a command behind it."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
TABLE = (ROOT / "tests/project/readme_facts.md").read_text("utf-8")
ROWS = [
    line[2:-2].replace(r"\|", "|").rpartition(" | ")
    for line in TABLE.partition("|---|---|\n")[2].splitlines()
]
SHOWN = re.compile(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|md|jsonl?|yml))(?:::(\w+))?`")
OTHERS = re.compile(r"^[\w-]+/[\w.-]+, (?:[\w-]+/)*[\w-]+\.(?:py|md|yml|gin)\b")


def test_quotes_stand_in_the_readme() -> None:
    text = " ".join(README.split())
    assert len(ROWS) > 60
    for statement, _, _ in ROWS:
        assert statement in text, statement


def test_the_files_and_tests_of_this_project_exist() -> None:
    """A row without any names another's repository and file, which no test reads."""
    for statement, _, behind in ROWS:
        shown = SHOWN.findall(behind)
        assert shown or OTHERS.match(behind), statement
        for file, test in shown:
            code = (ROOT / file).read_text("utf-8")
            assert not test or f"\ndef {test}(" in code, (file, test)


def test_every_section_has_rows() -> None:
    text = " ".join(README.split())
    for section in text.split(" ## "):
        assert any(statement in section for statement, _, _ in ROWS), section[:40]


def test_the_speed_is_the_committed_one() -> None:
    lines = (ROOT / "experiments/benchmarks/results.jsonl").read_text("utf-8")
    cases = [
        case for line in map(json.loads, lines.splitlines()) for case in line["cases"]
    ]
    committed = {
        tuple(case["sides"][name]["tokens_per_second"] for name in ("ours", "peer"))
        for case in cases
        if {"ours", "peer"} <= {*case["sides"]}
    }
    number = r"([\d,.]+) tokens/s"
    rows = re.findall(rf"\| {number} \| {number} \| ([\d.]+) \|", README)
    assert len(rows) >= 3
    for ours, peer, ratio in rows:
        stated = [float(each.replace(",", "")) for each in (ours, peer)]
        assert any(
            abs(pair[0] - stated[0]) < 1
            and abs(pair[1] - stated[1]) < 1
            and f"{pair[0] / pair[1]:.1f}" == ratio
            for pair in committed
        ), (ours, peer, ratio)
