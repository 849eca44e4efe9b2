"""What the command line's flags ask for: a mode, a config and a workdir."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from txl_jax import config as configs
from txl_jax import workdir
from txl_jax.config import Config
from txl_jax.errors import UserError, nearest, require_one_of

# The modes whose flags are also those of one section, without its name.
OWN = {
    "train": "run",
    "evaluate": "eval",
    "generate": "generate",
    "score": "score",
    "attention": "attention",
    "prepare": "data",
    "import": "convert",
    "export": "convert",
    "compile": "compile",
    "table": "table",
    "speed": "speed",
    "recl": "recl",
}

# The modes that make their runs' configs, and the sections that they read themselves;
# of these the first is not the runs'.
MAKERS = {"import": ("convert.",), "table": ("table.", "run.")}


class Command(NamedTuple):
    """What the flags ask for."""

    mode: str
    config: Config
    workdir: Path
    overrides: dict[str, str]  # in import, table and recl, of other configs
    origins: dict[str, str]  # what gave a field its value: a file, or a flag
    print_config: bool


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises UserError where argparse would print its usage and exit."""
        raise UserError(message)


def parse(argv: list[str], modes: list[str]) -> Command:
    """Returns what the flags ask for; raises UserError."""
    parser = Parser()
    for name, default in (("config", ""), ("workdir", ""), ("mode", "train")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--print_config", action="store_true")
    given, rest = parser.parse_known_args(argv)
    require_one_of(given.mode, modes, "--mode")
    overrides = parse_overrides(rest, OWN.get(given.mode, ""))
    if given.mode in MAKERS:
        return _parse_maker(given, overrides)
    if given.mode == "recl":
        return _parse_recl(given, overrides)
    if given.config:
        config, source = configs.load(given.config), given.config
        folder = workdir.find(given.workdir or f"runs/{Path(given.config).stem}")
    elif given.workdir:
        folder = workdir.find(given.workdir)
        source = str(folder / workdir.CONFIG)
        config = configs.load_json(folder / workdir.CONFIG)
    else:
        raise UserError("give --config=FILE, or the --workdir of a run; see --help")
    origins = _differing(configs.parse(config), source) if given.print_config else {}
    for name, text in overrides.items():
        configs.override(config, name, text)
        origins[name] = "a flag"
    parsed = configs.parse(config)
    return Command(given.mode, parsed, folder, overrides, origins, given.print_config)


def _differing(config: Config, source: str) -> dict[str, str]:
    """Returns {field: source} of the fields that are not at their defaults."""
    return {
        f"{section}.{field.name}": source
        for section, fields in configs.SECTIONS.items()
        for field in dataclasses.fields(fields)
        if getattr(getattr(config, section), field.name) != field.default
    }


def _parse_maker(given: argparse.Namespace, overrides: dict[str, str]) -> Command:
    """Returns what a mode is asked that makes the configs of its runs itself."""
    mode, needed = given.mode, "" if given.workdir else "give --workdir, and "
    if given.config or not given.workdir:
        raise UserError(
            f"{mode} makes a workdir's config itself: {needed}instead of --config its "
            "fields, such as --config.data.corpus"
        )
    if "://" in given.workdir:
        raise UserError(
            f"--workdir={given.workdir!r}: {mode} makes workdirs in a folder of this "
            "machine; give one"
        )
    folder = workdir.find(given.workdir)
    config = configs.default()
    own = {name: x for name, x in overrides.items() if name.startswith(MAKERS[mode])}
    for name, text in own.items():
        configs.override(config, name, text)
    section = MAKERS[mode][0]
    others = {name: x for name, x in overrides.items() if not name.startswith(section)}
    origins = dict.fromkeys(own, "a flag")
    parsed = configs.parse(config)
    return Command(mode, parsed, folder, others, origins, given.print_config)


def _parse_recl(given: argparse.Namespace, overrides: dict[str, str]) -> Command:
    """Returns what a comparison is asked: its models bring their own configs."""
    if given.config:
        raise UserError(
            "recl reads the configs of --workdirs: leave --config out, and give what "
            "is to be another for all of them, such as --config.eval.mem_len=640"
        )
    config = configs.default()
    own = {name: x for name, x in overrides.items() if name.startswith("recl.")}
    for name, text in own.items():
        configs.override(config, name, text)
    others = {name: text for name, text in overrides.items() if name not in own}
    folder = workdir.find(given.workdir or "runs/recl")
    origins, parsed = dict.fromkeys(own, "a flag"), configs.parse(config)
    return Command("recl", parsed, folder, others, origins, given.print_config)


def parse_overrides(argv: list[str], own: str) -> dict[str, str]:
    """Returns config fields and their texts; section `own` also has flat flags."""
    parser = Parser()
    for section, fields in configs.SECTIONS.items():
        for field in dataclasses.fields(fields):
            flat = [f"--{field.name}"] if section == own else []
            name = f"{section}.{field.name}"
            # A boolean's flag alone means true.
            alone: dict[str, Any] = {"nargs": "?", "const": "true"}
            parser.add_argument(
                f"--config.{name}",
                *flat,
                dest=name,
                **(alone if field.type is bool else {}),
            )
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        known = ["--config", "--workdir", "--mode", "--help", "--helpfull"]
        known += ["--print_config"]
        known += parser._option_string_actions
        raise UserError(f"unknown flag {flag!r}{nearest(flag, known)}; see --help")
    return {name: text for name, text in vars(found).items() if text is not None}
