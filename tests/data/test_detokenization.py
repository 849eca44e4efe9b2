"""What a model of words has written reads as it was before it was cut."""

import pytest

from tests.support.refusal import refused
from txl_jax.data.detokenization import check_detokenizes, detokenize

WIKITEXT = {
    "= Valkyria Chronicles =": "= Valkyria Chronicles =",
    "= = Plot = =": "== Plot ==",
    "= = = Early life = = =": "=== Early life ===",
    "a four @-@ year @-@ old , who had 1 @,@ 000 @.@ 5 .": (
        "a four-year-old, who had 1,000.5."
    ),
    'he said " it \'s mine ! " , and ( quietly ) left .': (
        'he said "it\'s mine!", and (quietly) left.'
    ),
    "it did n't cost $ 5 or 10 % ; 30 ° C :": "it didn't cost $5 or 10%; 30° C:",
    "the <unk> and the players ' wives": "the <unk> and the players ' wives",
    'an unpaired " quote stays': 'an unpaired " quote stays',
    "version 2 .5 a .b": "version 2 .5 a .b",
}


@pytest.mark.parametrize("cut, written", WIKITEXT.items())
def test_wikitext(cut: str, written: str) -> None:
    assert detokenize(cut, "wikitext103") == written
    assert detokenize(written, "wikitext2") == written, "what is written stays"


def test_a_line_depends_on_no_other() -> None:
    lines = [*WIKITEXT, ""]
    whole = detokenize("\n".join(lines), "wikitext2")
    assert whole.split("\n") == [detokenize(line, "wikitext2") for line in lines]


def test_penn_treebank_and_one_billion_words() -> None:
    cut = "mr. <unk> does n't think it 's $ N million , or N %"
    written = "mr. <unk> doesn't think it's $N million, or N%"
    assert detokenize(cut, "ptb") == written
    assert detokenize('He ( Bob ) \'d said " no . "', "lm1b") == (
        'He (Bob)\'d said "no."'
    )


@pytest.mark.parametrize("corpus, kind", [("stdlib", "byte"), ("wikitext2", "subword")])
def test_text_that_was_not_cut_so_is_refused(corpus: str, kind: str) -> None:
    with refused("leave it out"):
        check_detokenizes(corpus, kind)
    check_detokenizes("ptb", "word")
