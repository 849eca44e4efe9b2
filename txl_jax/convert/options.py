"""Options of import and export."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """What to import or export; model.* fields supply what the files lack."""

    # The format: txl_jax, a model in one file, or for import also huggingface, nvidia,
    # or the paper's pytorch or tensorflow.
    format: str = ""
    source: str = ""  # The file or folder that the mode import reads.
    target: str = ""  # The file that the mode export creates.
