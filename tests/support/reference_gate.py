"""GTrXL's gated residuals in numpy, feature by feature: a part of `tests.reference`."""

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Params = dict[str, Any]


def add(sublayer: Params, x_LD: Array, y_LD: Array) -> Array:
    """Returns x + y, or g(x, ReLU(y)) if the sublayer has a gate's parameters."""
    if "gru" not in sublayer:
        return x_LD + y_LD
    rows = zip(x_LD, np.maximum(y_LD, 0.0), strict=True)
    return np.array([gate(sublayer["gru"], x_D, y_D) for x_D, y_D in rows])


def gate(gru: Params, x_D: Array, y_D: Array) -> Array:
    """Returns g(x, y) of one token, in the order of the paper's equations."""

    def sigmoid(a: float) -> float:
        return 1 / (1 + math.exp(-a))

    def product(name: str, v_D: Array) -> Array:
        return v_D @ gru[name]["kernel"]

    g_D, D = np.zeros(len(x_D)), range(len(x_D))
    r_D = np.array(
        [sigmoid(product("W_r", y_D)[d] + product("U_r", x_D)[d]) for d in D]
    )
    for d in D:
        z = sigmoid(product("W_z", y_D)[d] + product("U_z", x_D)[d] - gru["bias"][d])
        h = math.tanh(product("W_g", y_D)[d] + product("U_g", r_D * x_D)[d])
        g_D[d] = (1 - z) * x_D[d] + z * h
    return g_D
