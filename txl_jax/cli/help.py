"""The text of --help, --helpfull and --print_config."""

import inspect
import textwrap
from collections.abc import Iterable
from typing import Any, get_args

import txl_jax
from txl_jax.cli.flags import MODES, Command
from txl_jax.config import FIELDS, SECTIONS, values_of
from txl_jax.fields import Choices, Field, Section

SHORT = """\
txl {version}: Transformer-XL in JAX

usage: txl [MODE] --config=FILE|NAME [--workdir=DIR] [--FIELD=VALUE ...]
       (or python -m txl_jax)

examples:
  txl generate --model=shakespeare --prompt='ROMEO:'
  txl train --config=quickstart
  txl evaluate --workdir=runs/quickstart --split=valid
  txl generate --workdir=runs/quickstart --prompt='def '
  txl train --config=quickstart --workdir=runs/mine --config.data.corpus=text \\
      --config.data.path=book.txt
  txl --config=wt103 --print_config

modes:
{modes}

flags:
  --config=FILE|NAME  the file of an experiment, or the name of a packaged one;
                      without it, the config of the run in the workdir
  --model=NAME|FILE   instead of a workdir, a packaged model (shakespeare) or a file
  --workdir=DIR       the folder of the run, also gs:// (default: runs/NAME)
  --mode=MODE         one of the modes above, also as the first word (default: train)
  --config.S.F=VALUE  sets field F of the config's section S, which is one of
{sections}
  --F=VALUE           sets field F of the section that belongs to the mode
  --quick             a trial in less than a minute: few updates, tokens or layers
  --print_config      print every field and the origin of its value, and exit
  --help              print this, or after a mode (txl generate --help) its own flags
  --helpfull          print every field of every section, its meaning and default
  --version           print the versions of txl_jax and jax, and the devices

The same command resumes a run that was stopped. Progress and a line with the main
figures go to stderr; the last line on stdout is one JSON object.
"""

MORE = "Flags of every mode: txl --help. The fields of all sections: txl --helpfull."

EMPTY = '""'  # an empty text or list


def summary(section: type[Section]) -> str:
    """Returns the first paragraph of a section's docstring."""
    return (inspect.getdoc(section) or "").split("\n\n")[0].replace("\n", " ")


def as_flag(value: Any) -> str:
    """Returns the text of a flag that sets a field to `value`, without line ends."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(as_flag, value))
    return value.encode("unicode_escape").decode() if type(value) is str else str(value)


def type_name(field: Field) -> str:
    """Returns bool, int, float or str; for a tuple ints, etc."""
    items = get_args(field.type)
    return f"{items[0].__name__}s" if items else field.type.__name__


def meaning(field: Field) -> str:
    """Returns the field's help, which ends with the choices if there are any."""
    if not isinstance(field.check, Choices):
        return field.help
    return f"{field.help} One of {', '.join(x or EMPTY for x in field.check)}."


def short() -> str:
    """Returns the help that fits on a screen."""
    lines = [f"  {name:<10}  {mode.summary}" for name, mode in MODES.items()]
    names = textwrap.fill(", ".join(SECTIONS), 66)
    return SHORT.format(
        version=txl_jax.__version__,
        modes="\n".join(lines),
        sections=textwrap.indent(names, " " * 22),
    )


def full() -> str:
    """Returns the short help and every field of the config."""
    blocks = [short().rstrip()]
    for name, section in SECTIONS.items():
        modes = [x for x, mode in MODES.items() if mode.section == name]
        also = f" In mode {' and '.join(modes)} also --FIELD." if modes else ""
        blocks.append(textwrap.fill(f"{name}: {summary(section)}{also}", 88))
        blocks[-1] += "\n" + _flags(section.fields(), f"--config.{name}.")
    return "\n\n".join(blocks) + "\n"


def of_mode(mode: str) -> str:
    """Returns the help of one mode, with its own flags."""
    about = textwrap.fill(f"txl {mode}: {MODES[mode].summary}", 88)
    fields = SECTIONS[MODES[mode].section].fields()
    flags = _flags([field for field in fields if mode in field.modes], "--")
    return f"{about}\n\n{flags}\n\n{MORE}\n"


def _flags(fields: Iterable[Field], start: str) -> str:
    """Returns the description of the fields' flags, which begin with `start`."""
    lines = []
    for field in fields:
        default = as_flag(field.default) or EMPTY
        lines.append(f"  {start}{field.key}={type_name(field)} [{default}]")
        lines.append(textwrap.indent(textwrap.fill(meaning(field), 80), " " * 6))
    return "\n".join(lines)


def resolved(command: Command) -> str:
    """Returns every field of the command's config and the origin of its value."""
    lines = [f"# mode {command.mode}, workdir {command.workdir}"]
    for name, value in values_of(command.config).items():
        line = f"{name} = {as_flag(value) or EMPTY}"
        if name in command.origins:
            line += f"  # from {command.origins[name]}"
        if value != (default := FIELDS[name].default):
            line += f", default {as_flag(default) or EMPTY}"
        lines.append(line)
    count = len(command.origins)
    lines.append(f"# {count} of {len(lines) - 1} fields were set by a file or flag")
    return "\n".join(lines) + "\n"
