"""Undoes how a published corpus was cut into words, to read what a model has written.

What the corpora lost stays lost: their <unk>, Penn Treebank's N for every number and
its punctuation.

Dims: none.
"""

import re

from txl_jax.errors import UserError

Rules = list[tuple[str, str]]

# What the tokenizers of the Penn Treebank and of Moses have set apart.
ENGLISH: Rules = [
    (r" (n't|'(?:s|m|d|re|ve|ll))(?=[ ,.;:!?\"]|$)", r"\1"),
    (r" ([,.;:!?%])(?= |$)", r"\1"),
    (r"([(\[{]) ", r"\1"),
    (r" ([)\]}])", r"\1"),
    (r"([$£€#]) (?=[\dN])", r"\1"),
    (r'" ([^"]*?) "', r'"\1"'),
]
# WikiText has marks for what was inside a word, and headings between = signs.
WIKITEXT: Rules = [
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
    """Raises UserError for a corpus whose text is not cut into words in a known way."""
    if kind != "word" or corpus not in CORPORA:
        raise UserError(
            f"generate.detokenize is for the words of {', '.join(CORPORA)}: those of "
            f"corpus {corpus!r} (vocabulary {kind!r}) are shown as they are, so leave "
            "it out"
        )


def detokenize(text: str, corpus: str) -> str:
    """Returns the text as it is usually written; a line depends on no other line."""
    return "\n".join(_join(line, CORPORA[corpus]) for line in text.split("\n"))


def _join(line: str, rules: Rules) -> str:
    for pattern, written in rules:
        line = re.sub(pattern, written, line)
    return line
