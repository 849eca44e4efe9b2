"""Recorded results of Hugging Face's Transformer-XL, in tests/fixtures.

Torch and transformers==4.35.2, the last release whose port works, wrote the files; the
program is this file at revision a41055f. Each file has the config as JSON, the weights
under their published names, the tokens, and the results of the published code: see
`tests.promises.test_published_models`. The models are small and random in every
parameter, biases and norms included, so that every term of the mathematics counts.
"""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "fixtures"
CASES = sorted(x.stem for x in FOLDER.glob("*.npz") if not x.stem.startswith("train"))
B, L = 2, 5  # streams, and tokens of a segment
UPDATES = 30  # in a training case
