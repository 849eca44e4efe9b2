"""The text of --help, --helpfull and --print_config."""

import inspect
import textwrap
from collections.abc import Collection
from typing import Any, NamedTuple, get_args

import txl_jax
from txl_jax import config
from txl_jax.cli.flags import MODES, Command
from txl_jax.fields import Choices

SHORT = """\
txl {version}: Transformer-XL in JAX

usage: txl [MODE] --config=FILE|NAME [--workdir=DIR] [--FIELD=VALUE ...]
       (or python -m txl_jax)

examples:
  txl generate --model=shakespeare --prompt='ROMEO:'
  txl train --config=quickstart
  txl evaluate --workdir=runs/quickstart --mem_len=1024
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
  --print_config      print every field and the origin of its value, and exit
  --help              print this, or after a mode (txl generate --help) its own flags
  --helpfull          print every field of every section, its meaning and default
  --version           print the versions of txl_jax and jax, and the devices

The same command resumes a run that was stopped. Progress and a line with the main
figures go to stderr; the last line on stdout is one JSON object.
"""

MORE = "Flags of every mode: txl --help. The fields of all sections: txl --helpfull."

EMPTY = '""'  # an empty text or list


class Field(NamedTuple):
    """The description of one field."""

    name: str  # "section.field", such as "model.n_layer"
    type: str  # bool, int, float or str; "ints" etc. for a tuple
    default: str  # as the text of a flag
    meaning: str


def summary(section: type) -> str:
    """Returns the first paragraph of a section's docstring."""
    return (inspect.getdoc(section) or "").split("\n\n")[0].replace("\n", " ")


def as_flag(value: Any) -> str:
    """Returns the text of a flag that sets a field to `value`, without line ends."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(as_flag, value))
    return value.encode("unicode_escape").decode() if type(value) is str else str(value)


def describe(section: str) -> list[Field]:
    """Returns the fields of a section; their meanings end with the choices, if any."""
    fields = []
    for name, field in config.FIELDS.items():
        if name.partition(".")[0] == section:
            items = get_args(field.type)
            kind = (
                f"{items[0].__name__}s" if items else config.field_type(name).__name__
            )
            meaning, choices = field.metadata["help"], field.metadata["check"]
            if isinstance(choices, Choices):
                meaning += f" One of {', '.join(x or EMPTY for x in choices)}."
            fields.append(Field(name, kind, as_flag(field.default), meaning))
    return fields


def short() -> str:
    """Returns the help that fits on a screen."""
    lines = [f"  {name:<10}  {mode.summary}" for name, mode in MODES.items()]
    names = textwrap.fill(", ".join(config.SECTIONS), 66)
    return SHORT.format(
        version=txl_jax.__version__,
        modes="\n".join(lines),
        sections=textwrap.indent(names, " " * 22),
    )


def full() -> str:
    """Returns the short help and every field of the config."""
    blocks = [short().rstrip()]
    for section, options in config.SECTIONS.items():
        modes = [name for name, mode in MODES.items() if mode.section == section]
        also = f" In mode {' and '.join(modes)} also --FIELD." if modes else ""
        about = summary(options) + also
        blocks.append(textwrap.fill(f"{section}: {about}", 88))
        blocks[-1] += "\n" + _flags(section, config.FIELDS, f"--config.{section}.")
    return "\n\n".join(blocks) + "\n"


def of_mode(mode: str) -> str:
    """Returns the help of one mode, with its own flags."""
    about = textwrap.fill(f"txl {mode}: {MODES[mode].summary}", 88)
    own = _flags(MODES[mode].section, MODES[mode].fields, "--")
    return f"{about}\n\n{own}\n\n{MORE}\n"


def _flags(section: str, names: Collection[str], start: str) -> str:
    """Returns the flags of the section's fields among `names`; `start` begins each."""
    lines = []
    for field in describe(section):
        if field.name in names:
            name = field.name.partition(".")[2]
            lines.append(f"  {start}{name}={field.type} [{field.default or EMPTY}]")
            lines.append(textwrap.indent(textwrap.fill(field.meaning, 80), " " * 6))
    return "\n".join(lines)


def resolved(command: Command) -> str:
    """Returns every field of the command's config and the origin of its value."""
    lines = [f"# mode {command.mode}, workdir {command.workdir}"]
    for section in config.SECTIONS:
        values = getattr(command.config, section)
        for field in describe(section):
            value = as_flag(getattr(values, field.name.partition(".")[2]))
            line = f"{field.name} = {value or EMPTY}"
            if field.name in command.origins:
                line += f"  # from {command.origins[field.name]}"
            if value != field.default:
                line += f", default {field.default or EMPTY}"
            lines.append(line)
    count = len(command.origins)
    lines.append(f"# {count} of {len(lines) - 1} fields were set by a file or flag")
    return "\n".join(lines) + "\n"
