"""The text of --help, --helpfull and --print_config."""

import textwrap

import txl_jax
from txl_jax import config
from txl_jax.cli import schema
from txl_jax.cli.flags import MODES, Command

SHORT = """\
txl {version}: Transformer-XL in JAX

usage: txl --config=FILE|NAME [--workdir=DIR] [--mode=MODE] [--FIELD=VALUE ...]
       (or python -m txl_jax.main)

examples:
  txl --config=quickstart
  txl --workdir=runs/quickstart --mode=evaluate --mem_len=1024
  txl --workdir=runs/quickstart --mode=generate --prompt='def '
  txl --config=quickstart --workdir=runs/mine --config.data.corpus=text \\
      --config.data.path=book.txt
  txl --config=wt103 --print_config

modes:
{modes}

flags:
  --config=FILE|NAME  the file of an experiment, or the name of a packaged one;
                      without it, the config of the run in the workdir
  --workdir=DIR       the folder of the run, also gs:// (default: runs/NAME)
  --mode=MODE         one of the modes above (default: train)
  --config.S.F=VALUE  sets field F of the config's section S, which is one of
{sections}
  --F=VALUE           sets field F of the section that belongs to the mode
  --print_config      print every field and the origin of its value, and exit
  --helpfull          print every field of every section, its meaning and default
  --version           print the version

The same command resumes a run that was stopped. Progress goes to stderr; the last line
on stdout is one JSON object.
"""


GAP = " " * 14
EMPTY = '""'  # an empty text or list


def short() -> str:
    """Returns the help that fits on a screen."""
    lines = [
        textwrap.fill(f"  {name:<10}  {mode.summary}", 88, subsequent_indent=GAP)
        for name, mode in MODES.items()
    ]
    names = textwrap.fill(", ".join(config.SECTIONS), 66)
    return SHORT.format(
        version=txl_jax.__version__,
        modes="\n".join(lines),
        sections=textwrap.indent(names, " " * 22),
    )


def full() -> str:
    """Returns the short help and every field of the config."""
    blocks = [short().rstrip()]
    for section, fields in schema.describe(config.SECTIONS).items():
        modes = [name for name, mode in MODES.items() if mode.section == section]
        also = f" In mode {' and '.join(modes)} also --FIELD." if modes else ""
        about = schema.summary(config.SECTIONS[section]) + also
        lines = [textwrap.fill(f"{section}: {about}", 88)]
        for field in fields:
            default = field.default or EMPTY
            lines.append(f"  --config.{field.name}={field.type} [{default}]")
            meaning = textwrap.fill(field.meaning, 80)
            lines.append(textwrap.indent(meaning, " " * 6))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def resolved(command: Command) -> str:
    """Returns every field of the command's config and the origin of its value."""
    lines = [f"# mode {command.mode}, workdir {command.workdir}"]
    for section, fields in schema.describe(config.SECTIONS).items():
        values = getattr(command.config, section)
        for field in fields:
            value = schema.as_flag(getattr(values, field.name.partition(".")[2]))
            line = f"{field.name} = {value or EMPTY}"
            if field.name in command.origins:
                line += f"  # from {command.origins[field.name]}"
            if value != field.default:
                line += f", default {field.default or EMPTY}"
            lines.append(line)
    count = len(command.origins)
    lines.append(f"# {count} of {len(lines) - 1} fields were set by a file or flag")
    return "\n".join(lines) + "\n"
