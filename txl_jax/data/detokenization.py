"""Detokenization: published corpora's words as ordinary text.

<unk>, Penn Treebank's N for numbers and its missing punctuation cannot be restored.
"""

import re

from txl_jax.errors import UserError

Rules = list[tuple[str, str]]

# Separated by the tokenizers of the Penn Treebank and of Moses.
ENGLISH: Rules = [
    (r" (n't|'(?:s|m|d|re|ve|ll))(?=[ ,.;:!?\"]|$)", r"\1"),
    (r" ([,.;:!?%])(?= |$)", r"\1"),
    (r"([(\[{]) ", r"\1"),
    (r" ([)\]}])", r"\1"),
    (r"([$£€#]) (?=[\dN])", r"\1"),
    (r'" ([^"]*?) "', r'"\1"'),
]
# WikiText marks punctuation inside a word, and has headings between = signs.
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
    """Raises UserError for a corpus whose tokenizer is unknown."""
    if kind != "word" or corpus not in CORPORA:
        raise UserError(
            f"generate.detokenize is for the words of {', '.join(CORPORA)}: leave "
            f"it out for corpus {corpus!r} with vocabulary {kind!r}"
        )


def detokenize(text: str, corpus: str) -> str:
    """Returns ordinary text; lines are independent of each other."""
    return "\n".join(_join(line, CORPORA[corpus]) for line in text.split("\n"))


def _join(line: str, rules: Rules) -> str:
    for pattern, written in rules:
        line = re.sub(pattern, written, line)
    return line
