"""What the command line says of itself: its help, and the config that it resolved.

Dims: none.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

import txl_jax
from txl_jax import config, fields
from txl_jax.flags import OWN, Command

SHORT = """\
txl {version}: Transformer-XL in JAX

usage: txl --config=FILE|NAME [--workdir=DIR] [--mode=MODE] [--FIELD=VALUE ...]
       (or python -m txl_jax.main)

to begin with:
  txl --config=quickstart
  txl --workdir=runs/quickstart --mode=evaluate --mem_len=1024
  txl --workdir=runs/quickstart --mode=generate --prompt='def '
  txl --config=quickstart --workdir=runs/mine --config.data.corpus=text \\
      --config.data.path=book.txt
  txl --config=wt103 --print_config

modes:
{modes}

flags:
  --config=FILE|NAME  an experiment's file, or the name of a packaged experiment;
                      without it, the config that the workdir's run was started with
  --workdir=DIR       where the run lives, also gs:// (default: runs/NAME)
  --mode=MODE         one of the above (default: train)
  --config.S.F=VALUE  field F of the config's section S, which is one of
{sections}
  --F=VALUE           field F of the section that the mode has for its own
  --print_config      show every field, and what gave it its value, and do nothing
  --helpfull          every field of every section, with its meaning and default

The same command again goes on where a run stopped. Progress goes to stderr; the last
line on stdout is one JSON object.
"""


GAP = " " * 14
NOTHING = '""'  # an empty text, or none of several


def short(modes: Mapping[str, Any]) -> str:
    """Returns the help that fits a screen; a mode says its docstring."""
    lines = [
        textwrap.fill(f"  {name:<10}  {_first(run.__doc__)}", 88, subsequent_indent=GAP)
        for name, run in modes.items()
    ]
    names = textwrap.fill(", ".join(config.SECTIONS), 66)
    return SHORT.format(
        version=txl_jax.__version__,
        modes="\n".join(lines),
        sections=textwrap.indent(names, " " * 22),
    )


def full(modes: Mapping[str, Any]) -> str:
    """Returns the short help and every field of the config."""
    blocks = [short(modes).rstrip()]
    for section, found in fields.describe(config.SECTIONS).items():
        owners = [mode for mode, own in OWN.items() if own == section]
        also = f" In {' and '.join(owners)} also as --FIELD." if owners else ""
        about = fields.summary(config.SECTIONS[section]) + also
        lines = [textwrap.fill(f"{section}: {about}", 88)]
        for field in found:
            head = f"  --config.{field.name}={field.type} [{field.default or NOTHING}]"
            meaning = textwrap.indent(textwrap.fill(field.meaning, 80), " " * 6)
            lines += [head, meaning]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def resolved(command: Command) -> str:
    """Returns every field of the command's config, and what gave it its value."""
    lines = [f"# mode {command.mode}, workdir {command.workdir}"]
    for section, found in fields.describe(config.SECTIONS).items():
        given = getattr(command.config, section)
        for field in found:
            value = fields.as_flag(getattr(given, field.name.partition(".")[2]))
            line = f"{field.name} = {value or NOTHING}"
            if field.name in command.origins:
                line += f"  # from {command.origins[field.name]}"
            if value != field.default:
                line += f", default {field.default or NOTHING}"
            lines.append(line)
    count = len(command.origins)
    lines.append(f"# {count} of {len(lines) - 1} fields are not left at their defaults")
    return "\n".join(lines) + "\n"


def _first(docstring: str | None) -> str:
    return (docstring or "").strip().partition("\n")[0]
