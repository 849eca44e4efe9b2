"""Options of import and export."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
    """What to import or export; model.* fields supply what the files lack."""

    format: str = ""  # huggingface, nvidia, or the paper's pytorch or tensorflow
    source: str = ""  # import: the file or folder to read
    target: str = ""  # export: the folder to create
