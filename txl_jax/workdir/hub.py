"""Models as Hugging Face's hub lays them out: a folder of weights, config and card.

The weights of an exported folder are a released model in one file; `config.json` and
`vocab.json` repeat what its metadata says, for readers and for other programs.
"""

import json
from pathlib import Path

from txl_jax.convert import formats, huggingface
from txl_jax.convert import release as releases
from txl_jax.convert.release import Release
from txl_jax.data import vocab as vocabulary
from txl_jax.data.options import DataConfig
from txl_jax.errors import UserError
from txl_jax.metrics import parameter_count
from txl_jax.workdir.fit import imported_config
from txl_jax.workdir.folder import CONFIG, VOCAB

WEIGHTS = "model.safetensors"
OWN_TYPE = "txl_jax"
KNOWN = (OWN_TYPE, huggingface.MODEL_TYPE)


def save(release: Release, folder: Path, dtype: str) -> None:
    """Writes a released model to a new folder, with a model card to complete."""
    folder.mkdir()
    releases.save(release, folder / WEIGHTS, dtype)
    config = {"model_type": OWN_TYPE, **release.config["model"]}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (folder / VOCAB).write_text(vocabulary.dumps(release.vocab) + "\n", "utf-8")
    if tokenizer := release.vocab.to_json().get("tokenizer"):
        text = json.dumps(tokenizer, ensure_ascii=False)
        (folder / "tokenizer.json").write_text(text, "utf-8")
    corpus = release.config["data"]["corpus"]
    card = CARD.format(
        **release.config["model"],
        parameters=parameter_count(release.params),
        vocabulary=f"{len(release.vocab):,} tokens of kind {release.vocab.kind}",
        corpus=corpus,
        step=release.step,
        revision=release.origin.get("git_revision", "unknown"),
    )
    (folder / "README.md").write_text(card, "utf-8")


def find(path: Path) -> Path | None:
    """Returns the folder with a config.json of a model that a path names, or None."""
    folder = path.parent if path.name in huggingface.WEIGHTS else path
    weights = (folder / name for name in huggingface.WEIGHTS)
    if not (folder / CONFIG).is_file() or not any(map(Path.is_file, weights)):
        return None
    return folder if "model_type" in huggingface.read_json(folder / CONFIG) else None


def read(folder: Path) -> Release:
    """Returns the model that `save` or transfo-xl wrote; raises UserError."""
    stated = huggingface.read_json(folder / CONFIG)
    kind = stated.pop("model_type")
    if kind == huggingface.MODEL_TYPE:
        source = formats.read_huggingface(str(folder), DataConfig(), {})
        config = imported_config(source.model, source.vocab).to_dict()
        return Release(config, source.params, source.vocab, source.step, {})
    if kind != OWN_TYPE:
        raise UserError(
            f"{folder / CONFIG} has model_type = {kind!r}: supported are "
            f"{' and '.join(KNOWN)}"
        )
    release = releases.read(folder / WEIGHTS)
    saved = json.loads(json.dumps(release.config["model"]))
    if other := sorted(x for x in {*saved, *stated} if saved.get(x) != stated.get(x)):
        raise UserError(
            f"{folder / CONFIG} has another {other[0]} than {WEIGHTS}: copy both again"
        )
    return release


CARD = """---
library_name: txl_jax
pipeline_tag: text-generation
tags:
- transformer-xl
- jax
---

# A Transformer-XL trained on {corpus}

{n_layer} layers of {d_model} features, {n_head} heads, {parameters:,} parameters;
{vocabulary}; update {step} of a training with txl_jax at revision {revision}.

```python
import txl_jax

loaded = txl_jax.load("FOLDER")  # of these files
```

or `txl generate --model=FOLDER/model.safetensors`.

To complete by hand: the license, the source and license of the data, its language, the
evaluation, the uses that were meant, and known faults.
"""
