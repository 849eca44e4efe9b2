"""Messages of the TPU compiler, and programs that this jaxlib cannot read."""

from unittest.mock import Mock

import jax

from tests.support.refusal import refused
from txl_jax.aot.lower import memory_wanted, text_of


def test_out_of_memory_messages_of_the_compiler_are_read() -> None:
    form = "RESOURCE_EXHAUSTED: {} See https://openxla.org"
    for words, size in (
        ("Ran out of memory in hbm. Used 24.50G of 15.75G hbm.", 24.5 * 2**30),
        ("temporaries (120.00G) exceeds available HBM (15.48G).", 120 * 2**30),
        ("Something else ran out.", 0),
    ):
        assert memory_wanted(form.format(words)) == size
    assert memory_wanted("INVALID: Used 24.50G of 15.75G hbm.") == 0


def test_an_unreadable_program_names_the_libtpu_to_install() -> None:
    error = jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: 1 operand")
    with refused(r"RET_CHECK failure.*pip install 'jax\[tpu\]'"):
        text_of(Mock(**{"as_text.side_effect": error}))
