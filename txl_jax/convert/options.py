"""Options of import and export."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """What to import or export; model.* fields supply what the files lack."""

    # The format of the other code base: huggingface, nvidia, or the paper's pytorch or
    # tensorflow.
    format: str = ""
    source: str = ""  # The file or folder that the mode import reads.
    target: str = ""  # The folder that the mode export creates.
