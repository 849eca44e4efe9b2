"""Programs of `experiments` describe themselves."""

import pytest

from tests.project.conftest import EXPERIMENTS, Start

PROGRAMS = {
    f"{folder}.{path.stem}": path
    for folder in ("benchmarks", "figures")
    for path in sorted((EXPERIMENTS / folder).glob("*.py"))
    if "__main__" in path.read_text("utf-8")
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_the_docstring(
    name: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        start(name, "--help")
    assert exit.value.code == 0
    docstring = PROGRAMS[name].read_text("utf-8").split('"""')[1]
    assert docstring.splitlines()[0] in capsys.readouterr().out
