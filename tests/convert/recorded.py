"""Generates tests/convert/recorded with torch.save and Python 2.

`python -m tests.convert.recorded [python2]` with torch, transformers==4.35.2 and
sacremoses. The weights are those of tests/fixtures. The pickled classes have the names
of the published ones and hold only the weights; their modules do not exist when the
files are read.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import types
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import golden

FOLDER = Path(__file__).with_name("recorded")
PAPER = ("plain", "div_val_2_all_tied")  # cases with one u and w, as in the paper
NVIDIA = "div_val_2_all_tied"
WORDS = ["<eos>", "<unk>", "the", "=", "café", "naïve", "'s"]
WORDS += map(str, range(500, 530))
PYTHON2 = """
# -*- coding: utf-8 -*-
import collections, imp, json, pickle, sys
vocabulary = imp.new_module("vocabulary")
exec("class Vocab(object): pass", vocabulary.__dict__)
vocabulary.Vocab.__module__ = "vocabulary"
sys.modules["vocabulary"] = vocabulary
class Old: pass
words = [word.encode("utf-8") for word in json.loads(%r)]
vocab = vocabulary.Vocab()
vocab.idx2sym = words
vocab.sym2idx = collections.OrderedDict((w, i) for i, w in enumerate(words))
vocab.counter = collections.Counter(words)
vocab.special, vocab.lower_case, vocab.old = ["<eos>"], False, Old()
vocab.odd = set([1]), frozenset([2]), 2 ** 70, 1.5, u"caf\\xe9"
for protocol in (1, 2):
    with open(sys.argv[1] + "/cache%%d.pkl" %% protocol, "wb") as file:
        pickle.dump(vocab, file, protocol)
"""


def paper_state(name: str) -> dict[str, np.ndarray]:
    """Returns the state dict of a case in the paper's code."""
    state = {}
    with np.load(golden.FOLDER / f"{name}.npz") as case:
        for key in case:
            if key.startswith("state/"):
                array = case[key].astype(np.float32)
                key = key.removeprefix("state/").removeprefix("transformer.")
                if key.startswith("crit.cluster"):
                    array = array[::-1].copy()
                if "dec_attn.r_w_bias" not in key and "dec_attn.r_r_bias" not in key:
                    state[key] = array
    return state


def nvidia_state(name: str) -> dict[str, np.ndarray]:
    """Returns the state dict of a case in NVIDIA's code, with tied arrays once."""
    renamed = {}
    for key, array in paper_state(name).items():
        parts = key.split(".")
        if key.startswith("crit.out_layers") and parts[-1] == "weight":
            continue  # in a plain list
        if key.startswith("crit.out_layers"):
            key = f"crit.out_layers_biases.{parts[2]}"
        if key.startswith("crit.out_projs"):
            key = f"crit.shared_out_projs.{parts[2]}"
        renamed[key] = array
    return renamed


def nvidia_config(name: str) -> dict[str, Any]:
    """Returns the arguments of NVIDIA's model."""
    config = golden.BASE | golden.CASES[name]
    same = ("n_layer", "n_head", "d_model", "d_head", "d_inner", "d_embed", "div_val")
    also = ("mem_len", "cutoffs", "clamp_len", "dropout", "dropatt", "tie_projs")
    return {
        **{key: config[key] for key in (*same, *also)},
        **{"n_token": config["vocab_size"], "tie_weight": True, "pre_lnorm": False},
        **{"same_length": True, "attn_type": 0, "sample_softmax": -1, "dtype": None},
    }


def module(state: dict[str, np.ndarray]) -> Any:
    """Returns a module with these weights in nested modules; equal weights are tied."""
    import torch

    home = types.ModuleType("mem_transformer")
    kind = type("MemTransformerLM", (torch.nn.Module,), {"__module__": home.__name__})
    home.MemTransformerLM = kind  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    made: dict[bytes, Any] = {}
    root = kind()
    for key, array in state.items():
        *parents, last = key.split(".")
        inner = root
        for part in parents:
            if part not in inner._modules:
                inner.add_module(part, kind())
            inner = inner._modules[part]
        tensor = torch.nn.Parameter(torch.from_numpy(array))
        if key == "pos_emb.inv_freq":
            inner.register_buffer(last, tensor.detach())
        else:
            inner.register_parameter(last, made.setdefault(array.tobytes(), tensor))
    return root


def vocab_object() -> Any:
    """Returns an instance of a class whose module exists only now."""
    home = types.ModuleType("utils.vocabulary")
    kind = type("Vocab", (), {"__module__": home.__name__})
    home.Vocab = kind  # type: ignore[attr-defined]
    sys.modules |= {"utils": types.ModuleType("utils"), home.__name__: home}
    vocab: Any = kind()
    vocab.__dict__.update(vocab_fields())
    return vocab


def vocab_fields() -> dict[str, Any]:
    """Returns the fields of the published vocabularies."""
    return {
        "counter": Counter(WORDS),
        "special": ["<eos>"],
        "lower_case": False,
        "delimiter": None,
        "idx2sym": WORDS,
        "sym2idx": OrderedDict((word, i) for i, word in enumerate(WORDS)),
    }


def save_library_vocab() -> None:
    """Writes vocab.pkl as Hugging Face's tokenizer, with all of its attributes."""
    from transformers import TransfoXLTokenizer

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("words.txt").write_text("\n".join(WORDS), "utf-8")
        tokenizer = TransfoXLTokenizer(vocab_file="words.txt", lower_case=False)
        tokenizer.save_vocabulary(str(FOLDER))


def main() -> None:
    """Writes every file."""
    import torch

    FOLDER.mkdir(exist_ok=True)
    for name in PAPER:
        state = paper_state(name)
        for zipped, layout in ((False, "stream"), (True, "zip")):
            options = {"_use_new_zipfile_serialization": zipped}
            whole = module(state)
            torch.save(whole, FOLDER / f"{name}.module.{layout}.pt", **options)
            torch.save(whole.state_dict(), FOLDER / f"{name}.{layout}.pt", **options)
    saved = {
        "args": argparse.Namespace(dataset="wt103", lr=0.01, cuda=True),
        "model_config": nvidia_config(NVIDIA),
        "model_state": OrderedDict(
            (f"module.{key}", torch.from_numpy(array))
            for key, array in nvidia_state(NVIDIA).items()
        ),
        "optimizer_state": {"state": {0: {"exp_avg": torch.ones(3, 2).t()}}},
        "scheduler_state": {"base_lrs": [0.01]},
        "vocab": vocab_object(),
        "amp_state": None,
        **{"epoch": 3, "batch": 7, "last_iter": 9, "train_step": 40},
        "best_val_loss": np.float64(3.5),
    }
    torch.save(saved, FOLDER / "nvidia.pt", _use_new_zipfile_serialization=False)
    kinds = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    odd = {str(kind): torch.arange(-3, 3).to(kind) for kind in kinds}
    odd |= {"view": torch.arange(24.0).view(4, 6)[1:3, ::2], "none": torch.zeros(0, 4)}
    torch.save(odd, FOLDER / "kinds.zip.pt")
    torch.save(odd, FOLDER / "kinds.stream.pt", _use_new_zipfile_serialization=False)
    torch.save(vocab_fields(), FOLDER / "vocab.bin")
    save_library_vocab()
    if len(sys.argv) > 1:
        script = PYTHON2 % (json.dumps(WORDS),)
        subprocess.run([sys.argv[1], "-c", script, str(FOLDER)], check=True)


if __name__ == "__main__":
    main()
