"""The preparation of a corpus, once for all processes of a run."""

from txl_jax.data import tokens as token_files
from txl_jax.data.options import OWN, DataConfig
from txl_jax.data.tokens import Tokens
from txl_jax.data.vocab import Vocab
from txl_jax.errors import UserError
from txl_jax.runtime import distributed, preemption


def prepare(config: DataConfig, vocab: Vocab | None = None) -> Tokens:
    """Returns the corpus, after preparing it if its token files are missing.

    Raises UserError if `vocab`, that of the model to read it with, is another one.

    With several processes the first one prepares the corpus, then those that do not
    share its disk. A signal stops the preparation immediately; the next run continues
    it.
    """
    stop = preemption.current()
    if distributed.is_first():
        stop.holds = False
    tokens = distributed.first_then_others(lambda: token_files.prepare(config))
    stop.release()
    own, other = (each.to_json() for each in (vocab or tokens.vocab, tokens.vocab))
    if own.get("words", own) != other.get("words", other):  # lines may differ
        raise UserError(
            "the model has another vocabulary than the corpus: set data.vocab_path to "
            f"the vocab.json of its workdir, data.vocab to {OWN!r} and data.vocab_size "
            "to 0"
        )
    return tokens
