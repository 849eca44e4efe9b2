"""Messages of the TPU compiler."""

from txl_jax.aot.lower import memory_wanted


def test_out_of_memory_messages_of_the_compiler_are_read() -> None:
    form = "RESOURCE_EXHAUSTED: {} See https://openxla.org"
    for words, size in (
        ("Ran out of memory in hbm. Used 24.50G of 15.75G hbm.", 24.5 * 2**30),
        ("temporaries (120.00G) exceeds available HBM (15.48G).", 120 * 2**30),
        ("Something else ran out.", 0),
    ):
        assert memory_wanted(form.format(words)) == size
    assert memory_wanted("INVALID: Used 24.50G of 15.75G hbm.") == 0
