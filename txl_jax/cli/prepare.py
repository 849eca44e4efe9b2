"""The mode `prepare`: prepares the corpus of a config, once for all processes."""

from txl_jax.config import Config
from txl_jax.data import tokens as token_files
from txl_jax.data.options import DataConfig
from txl_jax.data.tokens import Tokens
from txl_jax.errors import UserError
from txl_jax.runtime import distributed
from txl_jax.runtime.preemption import stop


def prepare(config: DataConfig) -> Tokens:
    """Returns the corpus, after preparing it if its token files are missing.

    With several processes the first one prepares the corpus, then those that do not
    share its disk. A signal stops the preparation immediately; the next run continues
    it.
    """
    if distributed.is_first():
        stop.holds = False
    tokens = distributed.first_then_others(lambda: token_files.prepare(config))
    stop.release()
    return tokens


def check_token_ids(config: Config, vocab_size: int, *fields: str) -> None:
    """Raises UserError if one of the fields is not a token of the vocabulary."""
    for field in fields:
        section, _, name = field.partition(".")
        if (token := getattr(getattr(config, section), name)) >= vocab_size:
            raise UserError(
                f"{field} = {token} is not a token of this vocabulary: give one below "
                f"{vocab_size}"
            )
