"""Detokenization: published corpora's words as ordinary text.

<unk>, Penn Treebank's N for numbers and its missing punctuation cannot be restored.
"""

import re

from txl_jax.errors import UserError

# Separated by the tokenizers of the Penn Treebank and of Moses.
ENGLISH = [
    (r" (n't|'(?:s|m|d|re|ve|ll))(?=[ ,.;:!?\"]|$)", r"\1"),
    (r" ([,.;:!?%])(?= |$)", r"\1"),
    (r"([(\[{]) ", r"\1"),
    (r" ([)\]}])", r"\1"),
    (r"([$£€#]) (?=[\dN])", r"\1"),
    (r'" ([^"\n]*?) "', r'"\1"'),
]
# WikiText marks punctuation inside a word, and has headings between = signs.
WIKITEXT = [
    (r" @([-,.])@ ", r"\1"),
    (r"^ ?= = = (.*) = = = ?$", r"=== \1 ==="),
    (r"^ ?= = (.*) = = ?$", r"== \1 =="),
    *ENGLISH,
    (r" ° ", "° "),
]
CORPORA = {
    "wikitext2": WIKITEXT,
    "wikitext103": WIKITEXT,
    "lm1b": ENGLISH,
    "ptb": ENGLISH,
}


def check_detokenizes(corpus: str, kind: str) -> None:
    """Raises UserError for a corpus whose tokenizer is unknown."""
    if kind != "word" or corpus not in CORPORA:
        raise UserError(
            f"generate.detokenize is for the words of {', '.join(CORPORA)}: leave "
            f"it out for corpus {corpus!r} with vocabulary {kind!r}"
        )


def detokenize(text: str, corpus: str) -> str:
    """Returns ordinary text; lines are independent of each other."""
    for pattern, written in CORPORA[corpus]:
        text = re.sub(pattern, written, text, flags=re.MULTILINE)
    return text
