"""Runs the exported model in this file's folder, with only jax and safetensors."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from safetensors.numpy import load_file


class Model:
    """Reads tokens after a memory: `read` and `empty`."""

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.sizes = json.loads((folder / "config.json").read_text())
        arrays = load_file(folder / "parameters.safetensors")
        first = {x: arrays.pop(x) for x in list(arrays) if x.startswith("memory/")}
        self.first = {name.removeprefix("memory/"): x for name, x in first.items()}
        self.params = jax.device_put(arrays)
        self.programs = {}
        for name in ("segment", "token"):
            data = bytearray((folder / f"{name}.stablehlo").read_bytes())
            self.programs[name] = jax.jit(export.deserialize(data).call)

    def empty(self, batch_size: int) -> dict[str, Any]:
        """Returns the initial memory."""
        B, M = batch_size, self.sizes["mem_len"]
        filled_B = self.first["filled_B"].repeat(B) * M
        names = ("k_NHBMA", "v_NHBMA")
        return {x: self.first[x].repeat(B, 2).repeat(M, 3) for x in names} | {
            "filled_B": filled_B
        }

    def read(self, tokens_BT: Any, memory: Any) -> tuple[Any, Any]:
        """Returns (log_probs_BV after the last token, memory)."""
        tokens_BT = np.asarray(tokens_BT, np.int32)
        V = self.sizes["model"]["vocab_size"]
        if not tokens_BT.size or tokens_BT.min() < 0 or tokens_BT.max() >= V:
            raise ValueError(f"give one token or more from 0 to {V - 1} to each stream")
        B, T = tokens_BT.shape
        L, name = (1, "token") if T == 1 else (self.sizes["tgt_len"], "segment")
        for at in range(0, T, L):
            part_BL = tokens_BT[:, at : at + L]
            n = part_BL.shape[1]
            part_BL = np.pad(part_BL, ((0, 0), (0, L - n)))
            length_B = np.full(B, n, np.int32)
            log_probs_BLV, memory = self.programs[name](
                self.params, part_BL, length_B, memory
            )
        return log_probs_BLV[:, n - 1], memory
