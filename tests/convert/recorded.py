"""Checkpoints and vocabularies in tests/convert/recorded, as other programs wrote them.

torch.save and Python 2 pickled the weights of tests/fixtures. The pickled classes have
the names of the published ones and hold only the weights; their modules do not exist
when the files are read. In revision ffbf60d this file is the program that made them,
with torch, transformers 4.35.2 and Python 2.
"""

from pathlib import Path

FOLDER = Path(__file__).with_name("recorded")
PAPER = ("plain", "div_val_2_all_tied")  # cases with one u and w, as in the paper
NVIDIA = "div_val_2_all_tied"
WORDS = ["<eos>", "<unk>", "the", "=", "café", "naïve", "'s"]
WORDS += map(str, range(500, 530))
