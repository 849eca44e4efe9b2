"""The text of each token, for display beside its scores.

Dims: T tokens.
"""

from collections.abc import Callable, Iterable

import numpy as np

# Tokens on which the text of the next one may depend: a character has at most four
# bytes, and a word depends on whether it starts a line.
CONTEXT = 8
HALF = "\N{REPLACEMENT CHARACTER}"  # decoded from an incomplete character


def spell(
    decode: Callable[[Iterable[int]], str], tokens_T: np.ndarray, before: int = 0
) -> list[str]:
    """Returns the text that each token adds to the tokens before it.

    The concatenated results are the text, if that is valid UTF-8. All but the last byte
    of a character add "". The first `before` tokens are only context.
    """
    texts = []
    for at in range(before, len(tokens_T)):
        begin = max(at - CONTEXT, 0)
        shorter = decode(tokens_T[begin:at]).rstrip(HALF)
        longer = decode(tokens_T[begin : at + 1]).rstrip(HALF)
        texts.append(longer[len(shorter) :])
    return texts
