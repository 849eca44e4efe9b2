"""The folder of a run: its path, the names of its files, and its config.

The parsing of flags imports this module, so it must not import jax, even indirectly.
"""

import contextlib
import os
from pathlib import Path

import safetensors

from txl_jax import config as configs
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.runtime import storage

CONFIG = "config.json"
RUN = "run.json"  # provenance: code, libraries, devices, data, starts
VOCAB = "vocab.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
KERNELS_FILE = "kernels.json"  # the attention kernels that were measured
RESULT = "result.json"  # written after the last update


def find_workdir(address: str) -> Path:
    """Returns the folder of a --workdir, local or on gs://."""
    storage.to_utf8(address, "--workdir")
    return storage.user_path(address, "--workdir")


def read_config(folder: Path) -> Config:
    """Returns the config of a workdir; its UserErrors name other kinds of folders."""
    try:
        return configs.load_json(folder / CONFIG)
    except UserError as error:
        description = describe_path(folder)
        if description in ("", WORKDIR):
            raise
        raise UserError(f"{folder} is {description}") from error


WORKDIR = "the workdir of a run: give it as --workdir or train.init_from"
IMPORT = "make a workdir of it with --mode=import --format="
MODEL = f"a model in one file: give it as --model, or {IMPORT}txl_jax"
HUGGINGFACE = f"a model of Hugging Face: {IMPORT}huggingface"
# Descriptions by a pattern for the name of the file, or of a file in the folder.
DESCRIPTIONS = {
    RUN: WORKDIR,
    "record/metadata": "a checkpoint of a run: give the workdir that contains it",
    "*/record/metadata": "a run's checkpoints: give the workdir that contains them",
    "model*.safetensors": HUGGINGFACE,
    "pytorch_model.bin": HUGGINGFACE,
    "*.pt": f"a checkpoint of PyTorch: {IMPORT}pytorch or nvidia",
    "*.index": f"a checkpoint of TensorFlow: {IMPORT}tensorflow",
}


def describe_path(path: Path) -> str:
    """Describes a file or folder, and where it can be used; "" if it is unknown."""
    if storage.is_remote(path):
        return ""
    is_file = os.path.isfile(path)
    with contextlib.suppress(OSError, safetensors.SafetensorError):
        with safetensors.safe_open(path if is_file else "", "numpy") as file:
            if (file.metadata() or {}).get("format", "").startswith("txl_jax"):
                return MODEL
    with contextlib.suppress(OSError):
        for pattern, description in DESCRIPTIONS.items():
            if path.match(pattern) if is_file else any(path.glob(pattern)):
                return description
    return ""
