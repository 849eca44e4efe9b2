"""Text datasets that TFDS has prepared on this machine: `tfds:<name>`.

Only ArrayRecord can be read without TensorFlow and without copying a shard into memory;
TFDS writes it with file_format='array_record'.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from txl_jax.data.byte_ranges import Splits, whole
from txl_jax.data.options import SPLIT_NAMES, SPLITS
from txl_jax.errors import UserError
from txl_jax.report.progress import Progress
from txl_jax.runtime.storage import one_line

INFO = "dataset_info.json"
READ_BYTES = 1 << 22  # per read; reading single short texts was 30 times slower


def find(name: str, data_dir: Path) -> tuple[str, Path]:
    """Returns the edition of a TFDS dataset below `data_dir`, and its folder.

    `name` is `name` or `name/config`, with `:version` or without.
    """
    path, _, version = name.partition(":")
    root = data_dir / path
    # TFDS prepares in a folder "incomplete.<random>_<version>" beside the finished one.
    pattern = f"**/{version or '[0-9]*'}/{INFO}"
    is_inside = path and ".." not in root.parts and root.is_relative_to(data_dir)
    folders = sorted(x.parent for x in root.glob(pattern)) if is_inside else []
    if len(folders) != 1:
        names = ", ".join(str(folder.relative_to(data_dir)) for folder in folders)
        raise UserError(
            f"data.corpus='tfds:{name}' names {names or 'no dataset'} in {data_dir}: "
            "give one as tfds:<name>/<config>:<version>, prepared by TFDS with "
            "file_format='array_record', or set data.data_dir to where it is"
        )
    (folder,) = folders
    with refusing_damage(folder):
        data = (folder / INFO).read_bytes()
        kind = json.loads(data).get("fileFormat", "tfrecord")
    if kind != "array_record":
        raise UserError(
            f"data.corpus='tfds:{name}' is stored as {kind} in {folder}, which cannot "
            "be read without TensorFlow: prepare it with file_format='array_record'"
        )
    digest = hashlib.sha256(data).hexdigest()
    plain = "-".join(folder.relative_to(data_dir).parts)
    return f"{plain}-{digest[:8]}", folder


def unpack(folder: Path, scratch: Path) -> Splits:
    """Writes each split to a file in `scratch`, with a newline after every text."""
    import tensorflow_datasets as tfds  # importing it takes a second

    with refusing_damage(folder):
        builder = tfds.builder_from_directory(folder)
        feature = _text_feature(folder, builder.info.features)
        names = [name for name in builder.info.splits if name in SPLIT_NAMES]
        ours = {SPLIT_NAMES[name]: name for name in names}
    if missing := [split for split in SPLITS if split not in ours]:
        raise UserError(
            f"{folder} has the splits {', '.join(builder.info.splits)}, so "
            f"{', '.join(missing)} is missing: use a dataset with train, validation "
            "and test, or give its text as data.corpus='text'"
        )
    ranges: Splits = {}
    for split in SPLITS:
        info = builder.info.splits[ours[split]]
        progress = Progress(f"data: reading {split}", info.num_bytes, in_bytes=True)
        target = scratch / split
        with target.open("wb") as out:
            for text in _texts(builder, ours[split], feature, folder):
                out.write(text if text.endswith(b"\n") else text + b"\n")
                progress.add(len(text))
        ranges[split] = (whole(target),)
    return ranges


def _texts(builder: Any, split: str, feature: str, folder: Path) -> Iterator[bytes]:
    with refusing_damage(folder):
        source, info = builder.as_data_source(split), builder.info.splits[split]
        mean = info.num_bytes // max(info.num_examples, 1) + 1
        step = max(READ_BYTES // mean, 1)
        for start in range(0, len(source), step):
            indices = list(range(start, min(start + step, len(source))))
            for example in source.__getitems__(indices):
                yield example[feature]


@contextlib.contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    """Converts errors of TFDS, protobuf and ArrayRecord, of any type, to UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{folder} is damaged ({one_line(error)}): delete it and prepare again"
        ) from error


def _text_feature(folder: Path, features: Any) -> str:
    """Returns the feature "text", or the only "*text", or the only text feature."""
    import tensorflow_datasets as tfds

    kind = tfds.features.Text
    texts = sorted(x for x in features if isinstance(features[x], kind))
    ending = [name for name in texts if name.endswith("text")]
    for names in ([x for x in texts if x == "text"], ending, texts):
        if len(names) == 1:
            return names[0]
    raise UserError(
        f"{folder} has {len(texts)} text features ({', '.join(texts)}): use a dataset "
        "with one, or give its text as data.corpus='text'"
    )
