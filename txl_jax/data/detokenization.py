"""Published corpora's words as ordinary text, and the reverse.

<unk>, Penn Treebank's N for numbers and its missing punctuation cannot be restored.
"""

import re
from collections.abc import Collection

from txl_jax.errors import UserError

# Separated by the tokenizers of the Penn Treebank and of Moses.
ENGLISH = [
    (r" (n't|'(?:s|m|d|re|ve|ll))(?=[ ,.;:!?\"]|$)", r"\1"),
    (r"(?<=n) ('t)(?=[ ,.;:!?\"]|$)", r"\1"),
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
CUT = ("wikitext2", "wikitext103")
CORPORA = {**dict.fromkeys(CUT, WIKITEXT), "lm1b": ENGLISH, "ptb": ENGLISH}
# Moses's tokenizer for English, apart from points at the ends of words.
CUTS = [
    (r"(<(?!unk>)|(?<!<unk)>|[^\w\s.,'<>-]|\.\.+)", r" \1 "),
    (r",(?!\d)|(?<!\d),", " , "),
    (r"(?<=\S)'(?!\w)|(?<![\w>])'(?=\S)", " ' "),
    (r"(?<=[^\W\d_]|>)'(?=[^\W\d_])|(?<=\d)'(?=s)", " '"),
    (r"(?<=[\w>])-(?=[\w<])|(?<=\d)[.,](?=\d)", r" @\g<0>@ "),
]


def check_corpus(field: str, known: Collection[str], corpus: str, kind: str) -> None:
    """Raises UserError for a corpus whose tokenizer is unknown."""
    if kind != "word" or corpus not in known:
        raise UserError(
            f"{field} is for the words of {', '.join(known)}: leave it out for corpus "
            f"{corpus!r} with vocabulary {kind!r}"
        )


def tokenize(text: str, words: Collection[str]) -> str:
    """Returns ordinary text as WikiText's words; those of `words` keep a last point."""
    text = detokenize(text, CUT[0])
    for pattern, written in CUTS:
        text = re.sub(pattern, written, text)
    end = r"(\S*[^\s.])\.(?!\S)"
    return re.sub(end, lambda x: x[0] if x[0] in words else f"{x[1]} .", text)


def detokenize(text: str, corpus: str) -> str:
    """Returns ordinary text; lines are independent of each other."""
    for pattern, written in CORPORA[corpus]:
        text = re.sub(pattern, written, text, flags=re.MULTILINE)
    return text
