"""Section 3.3: absolute positions with a memory, whose tokens repeat the segment's.

    python -m txl_jax.main --config=wt103_temporal_confusion

No published number: the paper says why this cannot work. A token of the memory has the
place that it had in its own segment, so the model cannot tell the two apart. Differs
from wt103_128m in the positions.
"""

from ml_collections import ConfigDict

from txl_jax.experiments.ablations import wt103_128m


def get_config() -> ConfigDict:
    c = wt103_128m.get_config()
    c.model.position = "sinusoidal_repeated"
    return c
