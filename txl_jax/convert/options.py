"""Options of import and export."""

import dataclasses

from txl_jax.fields import check, field, one_of


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """What to import or export; model.* fields supply what the files lack."""

    # The format: txl_jax, a model in one file; for export also stablehlo, a folder of
    # programs that run without this package; for import also huggingface, nvidia, or
    # the paper's pytorch or tensorflow.
    format: str = field("", modes="export")
    # The file or folder that the mode import reads.
    source: str = field("", "unsaved", modes="import")
    # The file or folder that the mode export creates.
    target: str = field("", "unsaved", modes="train export")
    # The type of the numbers that the mode export writes: float32, or float16 for half
    # of the bytes. The numbers are rounded.
    dtype: str = field(one_of(("float32", "float16"), "float32"), modes="export")

    def __post_init__(self) -> None:
        """Raises UserError for an impossible value."""
        check(self, "convert")
