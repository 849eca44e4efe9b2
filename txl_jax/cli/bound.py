"""The measured utilization of TPUs beside its bounds, once in each start of a run."""

import time
from typing import Any

from jax.sharding import Mesh

from txl_jax.aot import chips
from txl_jax.aot.lower import Compiled, text_of
from txl_jax.cli.compile import describe
from txl_jax.config import Config
from txl_jax.report.log import say
from txl_jax.runtime import distributed


class Bound:
    """Wraps a jitted step, and reports the utilization of its second full call.

    Reports nothing unless the devices are TPUs of a known chip.
    """

    def __init__(self, config: Config, mesh: Mesh, step: Any):
        self.config, self.step = config, step
        self.updates = config.train.updates_of_call(config.checkpoint.every_steps)
        self.devices = list(mesh.devices.flat)
        self.tpus = chips.attached(self.devices) if distributed.is_first() else None
        self.program: Any = None
        self.clock = 0.0  # when the first call's metrics were fetched

    def __call__(self, *args: Any) -> Any:
        """Calls the step, and keeps its program."""
        if self.tpus and not self.clock and self.program is None:
            self.program = self.compile(*args)
        return self.step(*args)

    def compile(self, *args: Any) -> Any:
        """Returns the program of a call, which the call reuses."""
        return self.step.lower(*args).compile()

    def fetched(self, step: int, updates: list[Any], *_: Any) -> None:
        """Reports the utilization between the fetches of the first two calls."""
        if self.program is None:
            return
        if len(updates) < self.updates:  # a shorter call, of another program
            self.program, self.clock = None, 0.0
            return
        if not self.clock:
            self.clock = time.perf_counter()
            return
        seconds = (time.perf_counter() - self.clock) / len(updates)
        try:
            assert self.tpus
            compiled = Compiled(text_of(self.program), 0, 0.0)
            cost = describe(self.config, self.devices, self.tpus, compiled)
            low, high = sorted(cost["utilisation"].values())
            mfu = high * min(cost["step_seconds"].values()) / seconds
            bounds = f"between {low:.0%} and {high:.0%}"
            say(f"mfu {mfu:.0%} measured; --mode=compile bounds it {bounds}")
        except Exception as error:  # a report must not end the run
            say(f"mfu cannot be compared with its bounds ({error!r:.200})")
        self.program = None
