"""Options of import and export."""

import dataclasses

from txl_jax.fields import check, field, one_of


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """Import and export; model.* fields supply values that the files lack."""

    format: str = field(
        "",
        help="Format: txl_jax, a model in one file; for import also huggingface, "
        "nvidia, or the paper's pytorch or tensorflow.",
    )
    source: str = field("", help="File or folder to import.")
    target: str = field("", help="File or folder to create by export.")
    dtype: str = field(
        "float32", one_of(("float32", "float16")), help="Type of exported numbers."
    )

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "convert")
