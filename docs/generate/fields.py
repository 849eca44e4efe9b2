"""The config's fields and the command line's flags, from the dataclasses."""

import inspect

from generate.markdown import code, table
from txl_jax import config as configs
from txl_jax.cli import flags, help
from txl_jax.fields import Field, Role


def default(field: Field) -> str:
    """Returns the default, as in a flag."""
    return code(help.as_flag(field.default))


def config() -> str:
    """Returns every section of the config: its sentence and its fields."""
    parts = []
    for name, section in configs.SECTIONS.items():
        rows = [
            (code(each.name), help.type_name(each), default(each), help.meaning(each))
            for each in section.fields()
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
            (code(f"--{each.key}"), default(each), help.meaning(each))
            for each in configs.SECTIONS[mode.section].fields()
            if name in each.modes
        ]
        parts.append(
            f"{{#mode-{name}}}\n## `--mode={name}`\n\n"
            + table(("flag", "default", "meaning"), rows)
        )
    return "\n".join(parts)


def changeable() -> str:
    """Returns the fields that may change when a run resumes."""
    whole, single = [], []
    for section, options in configs.SECTIONS.items():
        free = [x for x in options.fields() if Role.IDENTITY not in x.roles]
        if len(free) == len(options.fields()):
            whole.append(code(f"{section}.*"))
        else:
            single += [code(each.name) for each in free]
    return f"{', '.join(whole)}; and of the other sections {', '.join(single)}."
