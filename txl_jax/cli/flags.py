"""Parses the command line into a mode, a config and a workdir.

This module does not import jax, directly or indirectly, so that help and flag errors
appear immediately.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.errors import UserError, nearest, require_one_of
from txl_jax.runtime import upgrade
from txl_jax.workdir.folder import find


class Mode(NamedTuple):
    """One mode of the command line; `modes.RUN` has its function."""

    summary: str
    section: str = ""  # its fields are also flags of the mode, without the section
    parallel: bool = False  # may run as several processes


MODES = {
    "train": Mode("Trains, then scores the best checkpoint.", "run", True),
    "evaluate": Mode(
        "Scores a split; also sweeps a field, or plots the loss since a cold start.",
        "eval",
        True,
    ),
    "generate": Mode("Continues prompts, or contexts of a split.", "generate", True),
    "score": Mode("Scores your own texts by document, line or token.", "score"),
    "attention": Mode("Maps the attention of each head, as a web page.", "attention"),
    "prepare": Mode("Encodes the corpus and counts its tokens.", "data", True),
    "import": Mode("Creates a workdir from another code base's model.", "convert"),
    "export": Mode("Writes the model in another code base's format.", "convert"),
    "compile": Mode(
        "Compiles for TPUs without TPUs: memory use and speed bounds.", "compile"
    ),
    "table": Mode(
        "Trains and compares the rows of the paper's Tables 6, 7 or 10.", "table", True
    ),
    "speed": Mode(
        "Times evaluation with memory against sliding windows (Table 9).", "speed"
    ),
    "recl": Mode(
        "Compares the effective context length of several workdirs' models.", "recl"
    ),
}

# Modes whose runs have their own configs, and the sections that the mode itself reads.
# Overrides of all sections but the first apply to the configs of the runs.
OUTER = {"import": ("convert.",), "table": ("table.", "run."), "recl": ("recl.",)}

GENERAL = ("--config", "--workdir", "--mode", "--print_config", "--version", "--help")


class Command(NamedTuple):
    """A parsed command line."""

    mode: str
    config: Config
    workdir: Path
    overrides: dict[str, str]  # in the modes of OUTER, for the runs' configs
    origins: dict[str, str]  # the file or flag that set a field
    print_config: bool


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of exiting."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        raise UserError(message)


def parse(argv: list[str]) -> Command:
    """Returns the parsed command line; raises UserError."""
    parser = Parser()
    for name, default in (("config", ""), ("workdir", ""), ("mode", "train")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--print_config", action="store_true")
    args, rest = parser.parse_known_args(argv)
    require_one_of(args.mode, list(MODES), "--mode")
    overrides = parse_overrides(rest, MODES[args.mode].section)
    if args.mode in OUTER:
        return _parse_outer(args, overrides)
    if args.config:
        config, source = configs.load(args.config), args.config
        folder = find(args.workdir or f"runs/{Path(args.config).stem}")
    elif args.workdir:
        folder = find(args.workdir)
        source = str(folder / configs.FILE)
        config = configs.load_json(folder / configs.FILE)
    else:
        raise UserError("give --config=FILE, or the --workdir of a run; see --help")
    origins = _set_fields(configs.parse(config), source) if args.print_config else {}
    return _command(args, config, folder, overrides, overrides, origins)


def _parse_outer(args: argparse.Namespace, overrides: dict[str, str]) -> Command:
    """Returns the command of a mode in OUTER."""
    mode = args.mode
    if args.config:
        raise UserError(
            f"--mode={mode} takes no --config, because its runs have their own: "
            "override single fields, such as --config.eval.mem_len=640"
        )
    if mode != "recl" and (not args.workdir or "://" in args.workdir):
        raise UserError(
            f"--workdir={args.workdir!r}: --mode={mode} creates workdirs in a folder "
            "of this machine; give one"
        )
    folder = find(args.workdir or "runs/recl")
    own, first = OUTER[mode], OUTER[mode][0]
    applied = {name: text for name, text in overrides.items() if name.startswith(own)}
    others = {x: text for x, text in overrides.items() if not x.startswith(first)}
    return _command(args, configs.default(), folder, applied, others, {})


def _command(
    args: argparse.Namespace,
    config: Any,
    folder: Path,
    applied: dict[str, str],
    overrides: dict[str, str],
    origins: dict[str, str],
) -> Command:
    for name, text in applied.items():
        configs.override(config, name, text)
    origins |= dict.fromkeys(applied, "a flag")
    parsed = configs.parse(config)
    return Command(args.mode, parsed, folder, overrides, origins, args.print_config)


def _set_fields(config: Config, source: str) -> dict[str, str]:
    """Returns {field: source} of the fields that are not at their defaults."""
    return {
        f"{section}.{field.name}": source
        for section, fields in configs.SECTIONS.items()
        for field in dataclasses.fields(fields)
        if getattr(getattr(config, section), field.name) != field.default
    }


def parse_overrides(argv: list[str], own: str) -> dict[str, str]:
    """Returns {field: text}; the fields of section `own` also have short flags."""
    parser = Parser()
    for section, fields in configs.SECTIONS.items():
        for field in dataclasses.fields(fields):
            short = [f"--{field.name}"] if section == own else []
            name = f"{section}.{field.name}"
            # A boolean's flag without a value means true.
            value: dict[str, Any] = {"nargs": "?", "const": "true"}
            parser.add_argument(
                f"--config.{name}",
                *short,
                dest=name,
                **(value if field.type is bool else {}),
            )
    for name in upgrade.OLD:
        section, _, key = name.partition(".")
        short = [f"--{key}"] if section == own else []
        parser.add_argument(
            f"--config.{name}", *short, dest=name, nargs="?", const="true"
        )
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = [*GENERAL, "--helpfull", *parser._option_string_actions]
        raise UserError(f"unknown flag {flag!r}{nearest(flag, known)}; see --help")
    texts = {name: text for name, text in vars(args).items() if text is not None}
    return dict(
        upgrade.upgrade_flag(name, text) if name in upgrade.OLD else (name, text)
        for name, text in texts.items()
    )
