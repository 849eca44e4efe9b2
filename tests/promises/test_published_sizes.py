"""The published models have the published numbers of parameters."""

import jax
import pytest

from txl_jax.metrics import parameter_count
from txl_jax.model.config import ModelConfig
from txl_jax.state import abstract_params

# The defaults: 12 layers for enwik8, whose vocabulary is 204 bytes.
ENWIK8 = ModelConfig(vocab_size=204)


@pytest.mark.parametrize(
    ("config", "total", "body"), [(ENWIK8, 41_055_436, 40_949_760)]
)
def test_parameter_counts(config: ModelConfig, total: int, body: int) -> None:
    """The body is what the original code counts as not embedding: its layers."""
    params = abstract_params(config)
    assert parameter_count(params) == total
    outside = [params["embedding"], params["u"], params["w"]]
    assert parameter_count(params) - parameter_count(outside) == body
    assert parameter_count(params["layers"]) == body


def test_counting_allocates_nothing() -> None:
    leaves = jax.tree.leaves(abstract_params(ENWIK8))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
