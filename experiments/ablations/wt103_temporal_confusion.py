"""Section 3.3: absolute positions with a memory, which repeat those of the segment.

    python -m txl_jax.main --config=wt103_temporal_confusion

No published number: the paper explains why this fails. A token in the memory keeps the
position of its own segment, so the model cannot distinguish it from a token at the same
position of the current one. Differs from wt103_128m in the positions.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_128m


def get_config() -> ConfigDict:
    c = wt103_128m.get_config()
    c.model.position = "sinusoidal_repeated"
    return c
