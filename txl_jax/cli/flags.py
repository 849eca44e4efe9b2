"""Parses the command line into a mode, a config and a workdir.

This module does not import jax, directly or indirectly, so that help and flag errors
appear immediately.
"""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from txl_jax import config as configs
from txl_jax.config import FIELDS, Config, values_of, with_values
from txl_jax.errors import UserError, nearest, prefixed, refuse, require_one_of
from txl_jax.fields import Role, Values
from txl_jax.runtime import storage
from txl_jax.workdir import release_file
from txl_jax.workdir.folder import (
    CONFIG,
    VOCAB,
    describe_path,
    find_workdir,
    read_config,
)


class Mode(NamedTuple):
    """One mode of the command line; `modes.RUN` has its function.

    own_configs: its runs have their own configs. The mode itself reads its section and
    `run`; the overrides of all other sections apply to these configs. quick: the values
    that --quick gives to fields without a flag.
    """

    summary: str
    section: str  # its fields are also flags of the mode, without the section
    parallel: bool = False  # may run as several processes
    model_file: bool = False  # reads a model, which may be one file instead of a run
    own_configs: bool = False
    quick: Values | None = None


MODES = {
    "train": Mode(
        "Trains, then scores the best checkpoint.",
        "run",
        parallel=True,
        quick={"train.num_steps": 20, "eval.max_tokens": 4000, "eval.baselines": False},
    ),
    "evaluate": Mode(
        "Scores a split; also by sweeps or cold starts.",
        "eval",
        parallel=True,
        model_file=True,
        quick={"eval.max_tokens": 4000},
    ),
    "generate": Mode(
        "Continues prompts, or contexts of a split.",
        "generate",
        parallel=True,
        model_file=True,
        quick={"generate.num_tokens": 20},
    ),
    "score": Mode(
        "Scores your own texts by document, line or token.", "score", model_file=True
    ),
    "attention": Mode(
        "Maps the attention of each head, as a web page.",
        "eval",
        model_file=True,
        quick={"eval.max_tokens": 128, "eval.mem_len": 64},
    ),
    "prepare": Mode("Encodes the corpus and counts its tokens.", "data", parallel=True),
    "import": Mode(
        "Creates a workdir from a model in a known format.", "convert", own_configs=True
    ),
    "export": Mode("Writes the model to one file.", "convert"),
    "compile": Mode(
        "Compiles for absent TPUs, and reports the memory.",
        "compile",
        quick={"model.n_layer": 1},
    ),
    "table": Mode(
        "Trains the rows of one of the paper's tables.",
        "table",
        parallel=True,
        own_configs=True,
    ),
    "speed": Mode("Times a memory against sliding windows (Table 9).", "eval"),
    "recl": Mode(
        "Compares the effective context lengths of models.", "recl", own_configs=True
    ),
}

INIT_FROM = "train.init_from"
# The flags that every mode has, with and without a value.
VALUES = "config workdir model mode"
SWITCHES = "help helpfull version print_config quick"


class Command(NamedTuple):
    """A parsed command line."""

    mode: str
    config: Config
    workdir: Path
    overrides: Values  # values of flags; with own_configs, for the runs' configs
    origins: dict[str, str]  # the file or flag that set a field
    model: Path | None = None  # the model in one file, without a workdir of its own


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError instead of printing the usage and exiting."""
        raise UserError(message)

    def read(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Returns the known flags and the rest; raises UserError for a repeated one."""
        first: dict[argparse.Action | None, str] = {}
        for flag in argv:
            option = self._option_string_actions.get(flag.partition("=")[0])
            line = f"{first.get(option)} and {flag} set one option: leave one out"
            refuse(option and option in first, line)
            first[option] = flag
        return self.parse_known_args(argv)


def parse(argv: list[str]) -> Command:
    """Returns the parsed command line; raises UserError."""
    args, rest = read_general(argv)
    args.mode = args.mode or "train"
    overrides = read_fields(rest, args.mode)
    if args.quick:
        overrides = quick_values(args.mode) | overrides
    start, source, folder, model = find_start(args, overrides)
    check_folder(folder)
    applied = overrides
    if MODES[args.mode].own_configs:
        section = f"{MODES[args.mode].section}."
        kept = section, "run."
        applied = {x: y for x, y in overrides.items() if x.startswith(kept)}
        overrides = {x: y for x, y in overrides.items() if not x.startswith(section)}
    taken, inherited = source, Values()
    if applied.get(INIT_FROM):
        taken, inherited = inherit(applied, folder)
    without = values_of(start) | inherited
    for name, value in (overrides | applied).items():
        if name not in applied or value != without[name]:
            check_effect(name, args.mode)
    config = with_values(start, inherited | applied)
    changed = configs.differences(config, Config())
    origins = {x: taken if x in inherited else source for x in changed}
    origins |= dict.fromkeys(applied, "a flag")
    return Command(args.mode, config, folder, overrides, origins, model)


def quick_values(mode: str) -> Values:
    """Returns what --quick sets; raises UserError for a mode that lacks it."""
    modes = ", ".join(name for name, each in MODES.items() if each.quick)
    values = MODES[mode].quick
    refuse(not values, f"--quick is for the modes {modes}, not {mode}: leave it out")
    return Values(values or {})


def find_start(
    args: argparse.Namespace, overrides: Values
) -> tuple[Config, str, Path, Path | None]:
    """Returns the config that flags change, its file, the workdir, a model's file."""
    if args.model:
        model = model_file(args.model, args.mode, args.config, overrides)
        config, default = release_file.load_config(model), f"runs/{model.stem}"
        return config, str(model), find_workdir(args.workdir or default), model
    if MODES[args.mode].own_configs:
        if args.config:
            raise UserError(
                f"--mode={args.mode} takes no --config, because its runs have their "
                "own: override single fields, such as --config.eval.mem_len=640"
            )
        if args.mode != "recl" and not args.workdir:
            raise UserError(f"--mode={args.mode} needs --workdir, the folder to create")
        return Config(), "", find_workdir(args.workdir or "runs/recl"), None
    if args.config:
        config, default = configs.load(args.config), f"runs/{Path(args.config).stem}"
        return config, args.config, find_workdir(args.workdir or default), None
    if args.workdir:
        folder = find_workdir(args.workdir)
        return read_config(folder), str(folder / CONFIG), folder, None
    raise UserError(
        "give --config=FILE, the --workdir of a run or a --model; see --help"
    )


def check_folder(folder: Path) -> None:
    """Raises UserError for a --workdir that exists and is not a folder."""
    exists = not storage.is_remote(folder) and os.path.exists(folder)
    if exists and not os.path.isdir(folder):
        description = describe_path(folder) or "no folder: give one, which may be new"
        raise UserError(f"--workdir={str(folder)!r} is {description}")


def model_file(name: str, mode: str, config: str, overrides: Values) -> Path:
    """Returns the file of --model; raises UserError for flags that do not fit it."""
    if not MODES[mode].model_file:
        modes = ", ".join(x for x, each in MODES.items() if each.model_file)
        raise UserError(
            f"--model is for the modes {modes}, not {mode}; to change a "
            "released model, import it with --mode=import --format=txl_jax"
        )
    if config or "eval.checkpoint" in overrides:
        raise UserError(
            f"--model={name} has its own config, and one checkpoint: leave --config "
            "and --checkpoint out, and override single fields"
        )
    return release_file.find_model(name)


def read_general(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags that every mode has, and the other arguments."""
    parser = Parser(add_help=False, allow_abbrev=False)
    word = argv[0] if argv and not argv[0].startswith("-") else ""
    for name in VALUES.split():
        parser.add_argument(f"--{name}", default="")
    for name in SWITCHES.split():
        short = ["-h"] if name == "help" else []
        parser.add_argument(f"--{name}", *short, action="store_true")
    args, rest = parser.read(argv[1:] if word else argv)
    if word and args.mode not in ("", word):
        raise UserError(f"{word!r} and --mode={args.mode} are two modes: leave one out")
    args.mode = args.mode or word
    require_one_of(args.mode or "train", list(MODES), "--mode")
    return args, rest


def read_fields(argv: list[str], mode: str) -> Values:
    """Returns the values that flags give to fields."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for name, field in FIELDS.items():
        section, _, key = name.partition(".")
        short = [f"--{key}"] if section == MODES[mode].section else []
        # A boolean's flag without a value means true.
        value: dict[str, Any] = {}
        if field.type is bool:
            value = {"nargs": "?", "const": "true"}
        parser.add_argument(f"--config.{name}", *short, dest=name, **value)
    args, unknown = parser.read(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        general = [f"--{name}" for name in f"{VALUES} {SWITCHES}".split()]
        known = *parser._option_string_actions, *general
        raise UserError(f"unknown flag {flag!r}{nearest(flag, known)}; see --help")
    texts = {name: text for name, text in vars(args).items() if text is not None}
    return {name: FIELDS[name].read(text) for name, text in texts.items()}


def check_effect(name: str, mode: str) -> None:
    """Raises UserError for a field that has no effect in the mode."""
    if mode not in FIELDS[name].modes:
        modes = ", ".join(x for x in MODES if x in FIELDS[name].modes)
        raise UserError(
            f"--config.{name} has no effect in the mode {mode}: leave it out (modes "
            f"with this flag: {modes})"
        )


def inherit(flags: Values, folder: Path) -> tuple[str, Values]:
    """Returns the config file of the workdir train.init_from, and the values it gives.

    A run that has begun keeps its own. Flags that describe a vocabulary replace it.
    """
    begun = storage.is_file(folder / CONFIG)
    with prefixed(f"{INIT_FROM} = {flags[INIT_FROM]!r}"):
        path = folder if begun else find_workdir(flags[INIT_FROM])
        saved = values_of(read_config(path))
    values = {x: saved[x] for x in FIELDS if Role.INHERITED in FIELDS[x].roles}
    of_vocab = {x: FIELDS[x].default for x in values if x.startswith("data.")}
    if flags.keys() & of_vocab.keys():
        values = {x: saved[x] for x in values if x not in of_vocab}
    elif not begun:
        own_copy = {"data.vocab_path": str(storage.absolute(folder) / VOCAB)}
        values |= of_vocab | own_copy
    return str(path / CONFIG), values
