"""The contents of the files in tests/convert/recorded.

torch.save and Python 2 wrote them, run by this file at revision a41055f. Their weights
are in tests/fixtures. The pickled classes have the names of the published ones and hold
only the weights; their modules do not exist.
"""

from pathlib import Path

import numpy as np

from tests.support import golden

FOLDER = Path(__file__).with_name("recorded")
PAPER = ("plain", "div_val_2_all_tied")  # cases with a single u and w, as in the paper
NVIDIA = "div_val_2_all_tied"
WORDS = ["<eos>", "<unk>", "the", "=", "café", "naïve", "'s"]
WORDS += map(str, range(500, 530))


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
