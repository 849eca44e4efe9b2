"""What a model of words has written reads as it was before it was cut."""

import pytest

from tests.support.refusal import refused
from txl_jax.data.detokenization import CORPORA, CUT, check_corpus, detokenize, tokenize

WIKITEXT = {
    "= Valkyria Chronicles =": "= Valkyria Chronicles =",
    "= = Plot = =": "== Plot ==",
    "= = = Early life = = =": "=== Early life ===",
    "four @-@ year @-@ old , had 1 @,@ 000 @.@ 5 .": "four-year-old, had 1,000.5.",
    'he said " it \'s mine ! " , and ( quietly ) left .': (
        'he said "it\'s mine!", and (quietly) left.'
    ),
    "it didn 't cost $ 5 or 10 % ; 30 ° C :": "it didn't cost $5 or 10%; 30° C:",
    "the <unk> and the players ' wives": "the <unk> and the players ' wives",
    'an unpaired " quote stays': 'an unpaired " quote stays',
    "version 2 .5 a .b": "version 2 .5 a .b",
}
OTHERS = {
    "mr. <unk> does n't say it 's $ N , or N %": "mr. <unk> doesn't say it's $N, or N%",
    'He ( Bob ) \'d said " no . "': 'He (Bob)\'d said "no."',
}


@pytest.mark.parametrize(
    "corpus, texts",
    [("wikitext103", WIKITEXT), ("wikitext2", WIKITEXT), ("ptb", OTHERS)],
)
def test_detokenization_restores_the_text(corpus: str, texts: dict[str, str]) -> None:
    """Each line by itself, and once only."""
    for cut, written in texts.items():
        assert detokenize(cut, corpus) == detokenize(written, corpus) == written
    whole = detokenize("\n".join([*texts, ""]), corpus)
    assert whole == "\n".join([*texts.values(), ""])


@pytest.mark.parametrize(
    "written, cut",
    [
        *((written, cut) for cut, written in WIKITEXT.items() if ". " not in cut),
        ("In the U.S. he made way.", "In the U.S. he made way ."),
        (
            "Wait... what?\n'So,' in the 1990's",
            "Wait ... what ?\n' So , ' in the 1990 's",
        ),
    ],
)
def test_text_is_cut_into_words(written: str, cut: str) -> None:
    words = {"U.S.", "..."}
    for text in (written, cut):
        lines = tokenize(text, words).split("\n")
        assert [" ".join(line.split()) for line in lines] == cut.split("\n")


@pytest.mark.parametrize("corpus, kind", [("stdlib", "byte"), ("wikitext2", "subword")])
def test_text_of_another_convention_is_refused(corpus: str, kind: str) -> None:
    with refused("generate.detokenize is for the words of .*: leave it out"):
        check_corpus("generate.detokenize", CORPORA, corpus, kind)
    check_corpus("generate.detokenize", CORPORA, "ptb", "word")
    with refused("generate.tokenize is for the words of wikitext2, wikitext103"):
        check_corpus("generate.tokenize", CUT, "ptb", "word")
