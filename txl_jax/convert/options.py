"""Options of import and export."""

import dataclasses

from txl_jax.fields import Role, Section, field, one_of


@dataclasses.dataclass(frozen=True)
class ConvertConfig(
    Section, name="convert", modes="train import export", roles=Role.LOCAL
):
    """Import and export; model.* fields supply values that the files lack."""

    format: str = field(
        "",
        help="Format: txl_jax, a model in one file; for import also huggingface, "
        "nvidia, or the paper's pytorch or tensorflow.",
    )
    source: str = field("", modes="import", help="File or folder to import.")
    target: str = field(
        "", modes="train export", help="File or folder to create by export."
    )
    dtype: str = field(
        "float32",
        one_of(("float32", "float16")),
        modes="train export",
        help="Type of exported numbers.",
    )
