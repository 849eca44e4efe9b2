"""What each token of a text stands for in it, to be shown beside the token's numbers.

Dims: T tokens.
"""

from collections.abc import Callable, Iterable

import numpy as np

# Tokens before a token that its text may depend on: a character has at most four bytes,
# a word whether a line begins.
CONTEXT = 8
HALF = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of a character's first bytes


def spell(
    decode: Callable[[Iterable[int]], str], tokens_T: np.ndarray, before: int = 0
) -> list[str]:
    """Returns the text that each token adds to those before it.

    Together they are the text, unless that holds bytes which are no character. Of a
    character of several bytes all but the last have "". The first `before` tokens are
    only read: a word after them begins with its space.
    """
    found = []
    for at in range(before, len(tokens_T)):
        begin = max(at - CONTEXT, 0)
        known = decode(tokens_T[begin:at]).rstrip(HALF)
        longer = decode(tokens_T[begin : at + 1]).rstrip(HALF)
        found.append(longer[len(known) :])
    return found
