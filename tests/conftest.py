"""Eight CPU devices, quick compilation and one compilation cache for all tests."""

import gc
import os
import shutil
from collections import defaultdict
from typing import Any, NoReturn

import jax
import pytest

from txl_jax.report import log
from txl_jax.runtime import distributed, programs

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# A tenth of the tracing time is garbage collection; finding lines of code takes more.
jax.config.update("jax_traceback_in_locations_limit", 0)
gc.freeze()
gc.set_threshold(100_000, 50, 50)
# Programs of tests are small, so most of their time is compilation, half of it for fast
# code and for dividing it among threads. Newer releases of jax lack one of the flags.
QUICK_FLAGS = ""
if jax.__version_info__ < (0, 11):
    QUICK_FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"
GIVEN_FLAGS = os.environ.get("XLA_FLAGS", "").removesuffix(QUICK_FLAGS)
os.environ["XLA_FLAGS"] = GIVEN_FLAGS + QUICK_FLAGS  # read once, by the first program
# A slow machine must not print more lines than a fast one.
log.QUIET_SECONDS = programs.QUIET_SECONDS = 3600.0

QUICK = "jax_disable_most_optimizations"
CACHE_BYTES = 2**30
FILE_SECONDS = 10.0  # slower files are listed at the end


def refuse_exit(line: str, status: int) -> NoReturn:
    """Stands in for `distributed.exit_now`, which would end this worker's tests."""
    raise AssertionError(f"run this test in a process of its own: {line} ({status})")


distributed.exit_now = refuse_exit


def configure_jax(name: str, value: Any) -> None:
    """Sets a field of jax's config here and in the programs that tests start."""
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)


def pytest_configure(config: pytest.Config) -> None:
    """Gives all workers, and the programs that tests start, one compilation cache.

    None of them uses the folder of the user.
    """
    if hasattr(config, "workerinput") or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return  # jax has read the environment
    if not hasattr(config, "cache"):
        return configure_jax("jax_enable_compilation_cache", False)
    folder = config.cache.mkdir(f"compiled-{programs.processor()}")
    if sum(path.stat().st_size for path in folder.iterdir()) > CACHE_BYTES:
        shutil.rmtree(folder)
    configure_jax("jax_compilation_cache_dir", str(folder))
    configure_jax("jax_persistent_cache_min_compile_time_secs", 0.0)
    configure_jax("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True, scope="session")
def quiet_orbax() -> None:
    """Mutes orbax's log and its messages about earlier failures, as programs do."""
    from txl_jax.checkpoint import save_restore

    save_restore.mute_orbax()


PROJECT = ("tests/launch/", "tests/project/", "tests/rl/")
# Long tests run first, so that no worker is left alone with one of them at the end.
FIRST = ("tests/faults/", "tests/promises/test_resume", "tests/promises/test_two")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests of files outside the package; orders all tests."""
    for item in items:
        if item.nodeid.startswith(PROJECT) and "long" not in item.keywords:
            item.add_marker("project")
    items.sort(
        key=lambda item: (
            "exact_bits" not in item.keywords,  # a worker changes its flags once
            not item.nodeid.startswith(FIRST),
        )
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles in half the time, except for the tests marked `exact_bits`.

    Programs that tests start inherit the choice.
    """
    quick = item.get_closest_marker("exact_bits") is None
    if jax.config.values[QUICK] != quick:
        os.environ["XLA_FLAGS"] = (
            GIVEN_FLAGS + QUICK_FLAGS * quick
        )  # for other processes
        configure_jax(QUICK, quick)
        jax.clear_caches()  # jit's own caches are not keyed by this field
    if not quick:
        os.environ.pop(QUICK.upper(), None)  # a user's program has no such variable


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the slow files."""
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    slow = sorted((-spent, name) for name, spent in seconds.items())
    slow = [row for row in slow if -row[0] > FILE_SECONDS]
    if slow:
        terminalreporter.section(f"files over {FILE_SECONDS:.0f} s")
    for spent, name in slow:
        terminalreporter.write_line(f"{-spent:7.1f} s  {name}")
