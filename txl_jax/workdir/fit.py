"""Fits a run's config to its vocabulary and its devices."""

import dataclasses

import jax
from jax.sharding import Mesh

from txl_jax import sharding
from txl_jax.config import Config
from txl_jax.errors import UserError
from txl_jax.model.config import ModelConfig


def fit_vocab(config: Config, vocab_size: int) -> Config:
    """Returns the config with model.vocab_size set, to the vocabulary's if it is 0."""
    size = config.model.vocab_size or vocab_size
    if size < vocab_size:
        raise UserError(
            f"model.vocab_size = {size} is less than the vocabulary's {vocab_size}; "
            "set it to 0 to take the vocabulary's"
        )
    model = dataclasses.replace(config.model, vocab_size=size)
    return dataclasses.replace(config, model=model)


def fit_mesh(config: Config, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns the mesh; raises UserError unless it divides devices and model evenly."""
    mesh = sharding.make_mesh(config.mesh, devices)
    rules = dict(sharding.RULES)
    for letter, field, size in _split_sizes(config.model):
        axis = rules[letter]
        if size % (parts := mesh.shape[axis]):
            raise UserError(
                f"model.{field} = {size} is not divisible by mesh.{axis} = {parts}: "
                f"make it a multiple of {parts}, or lower mesh.{axis}"
            )
    return mesh


def _split_sizes(model: ModelConfig) -> list[tuple[str, str, int]]:
    """Returns the sizes that the mesh splits, as (letter in RULES, field, size)."""
    sizes = [
        ("D", "d_model", model.d_model),
        ("E", "d_embed", model.embed_size),
        ("H", "n_head", model.n_head),
        ("F", "d_inner", model.d_inner),
    ]
    if model.div_val > 1 and model.cutoffs:
        return [*sizes, ("V", "cutoffs[0]", model.cutoffs[0])]
    return [*sizes, ("V", "vocab_size", model.vocab_size)]
