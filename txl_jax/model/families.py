"""What the code bases of published models do differently, besides their sizes."""

from typing import Any

from txl_jax.model.config import ModelConfig


def pytorch(**fields: Any) -> ModelConfig:
    """Returns the config of a model of the paper's PyTorch code."""
    std = fields.get("init_std", ModelConfig.init_std)
    return ModelConfig(**{"norm_init_std": std} | fields)


def nvidia(**fields: Any) -> ModelConfig:
    """Returns the config of a model of NVIDIA's PyTorch code."""
    return pytorch(**{"same_length_self": True} | fields)


def huggingface(**fields: Any) -> ModelConfig:
    """Returns the config of a model of Hugging Face's port."""
    return pytorch(**{"initial_memory": "zeros", "untie_r": True} | fields)


def tensorflow(**fields: Any) -> ModelConfig:
    """Returns the config of a model of the paper's TensorFlow code."""
    fields = {
        "layer_norm_epsilon": 1e-12,
        "initial_memory": "zeros",
        "same_length_self": True,
        **fields,
    }
    return ModelConfig(**fields)
