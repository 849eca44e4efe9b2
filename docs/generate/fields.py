"""The config's fields and the command line's flags, from the dataclasses."""

import inspect

from generate.markdown import code, table
from txl_jax import config as configs
from txl_jax.cli import flags, help

SECTIONS = {name: help.describe(name) for name in configs.SECTIONS}


def config() -> str:
    """Returns every section of the config: its sentence and its fields."""
    parts = []
    for name, fields in SECTIONS.items():
        section = configs.SECTIONS[name]
        rows = [
            (code(each.name), each.type, code(each.default), each.meaning)
            for each in fields
        ]
        file = inspect.getmodule(section).__name__.replace(".", "/")  # type: ignore[union-attr]
        parts.append(
            f"{{#section-{name}}}\n## `{name}`\n\n{help.summary(section)} "
            f"Defined in `{file}.py`.\n\n"
            + table(("field", "type", "default", "meaning"), rows)
        )
    return "\n".join(parts)


def modes() -> str:
    """Returns the modes, each with its sentence and the section of its flags."""
    rows = [
        (
            f"[`{name}`](#mode-{name})",
            mode.summary,
            code(mode.section),
        )
        for name, mode in flags.MODES.items()
    ]
    return table(("`--mode=`", "does", "its flags are the fields of"), rows)


def mode_flags() -> str:
    """Returns the flags that only one mode has, by mode."""
    parts = []
    for name, mode in flags.MODES.items():
        rows = [
            (code("--" + each.name.partition(".")[2]), code(each.default), each.meaning)
            for each in SECTIONS[mode.section]
            if each.name in mode.fields
        ]
        parts.append(
            f"{{#mode-{name}}}\n## `--mode={name}`\n\n"
            + table(("flag", "default", "meaning"), rows)
        )
    return "\n".join(parts)


def changeable() -> str:
    """Returns the fields that may change when a run resumes."""
    fixed = {name.partition(".")[0] for name in configs.IDENTITY}
    whole = [code(f"{name}.*") for name in SECTIONS if name not in fixed]
    inside = configs.select(" ".join(fixed))
    single = map(code, [name for name in inside if name not in configs.IDENTITY])
    return f"{', '.join(whole)}; and of the other sections {', '.join(single)}."
