"""How programs call a `TransformerXL`."""

from collections.abc import Callable

from txl_jax.model.config import ModelConfig
from txl_jax.model.initializers import Params
from txl_jax.model.memory.key_values import unstack
from txl_jax.model.memory.kinds import choose_kind
from txl_jax.model.txl import TransformerXL


def fixed_model(
    config: ModelConfig,
) -> tuple[TransformerXL, Callable[[Params], Params]]:
    """Returns the model for fixed parameters, and the function that lays them out.

    Call that function once, outside the loop of an evaluation or a generation.
    """
    if choose_kind(config).layout == "stacked":
        return TransformerXL(config), lambda params: params
    return TransformerXL(config, "separate"), unstack
