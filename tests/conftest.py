"""Every test runs on eight CPU devices, from a checkout as from an installation."""

from collections.abc import Iterator

import jax
import pytest

from txl_jax.report import wait

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# What is said depends on no machine's speed.
wait.QUIET_SECONDS = 3600.0


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """Compiles twice as fast: for a module in which nothing runs for long."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
