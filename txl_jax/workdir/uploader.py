"""Copies checkpoints to a bucket in the background."""

from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from txl_jax.errors import UserError
from txl_jax.report.log import say
from txl_jax.workdir import bucket as buckets
from txl_jax.workdir import lease
from txl_jax.workdir.bucket import Bucket, one_line


class Uploader:
    """One copy at a time, in a thread; one that fails is made up for by the next."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket
        self.failed: list[int] = []  # the newest steps of copies that failed
        self.reason = ""  # why the last of them did
        self._copying: tuple[int, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, "bucket")

    def begin(self, steps: Iterable[int]) -> None:
        """Starts to copy what is new; `steps` are the checkpoints in the folder."""
        self.poll(wait=True)
        if wanted := sorted(steps):
            self._copying = wanted[-1], self._thread.submit(self.bucket.store, wanted)

    def poll(self, wait: bool = False) -> None:
        """Says so if a copy failed; raises UserError if another run has the bucket."""
        if self._copying is None or not (wait or self._copying[1].done()):
            return
        (step, copying), self._copying = self._copying, None
        try:
            copying.result()
        except lease.Lost:
            raise
        except Exception as error:  # each version of the library raises its own kinds
            self.failed.append(step)
            self.reason = one_line(error)
            there = max(self.bucket.index, default=None)
            say(
                f"CHECKPOINT {step} COULD NOT BE COPIED TO {self.bucket.url} "
                f"({self.reason}): training goes on, the newest there is {there}; the "
                "next copy brings it too"
            )

    def finish(self, step: int, steps: Collection[int]) -> None:
        """Waits for the copy; raises UserError if `step` cannot be in the bucket."""
        self.poll(wait=True)
        if step not in steps:
            return
        if not self.bucket.has(step):
            self.begin(steps)
            self.poll(wait=True)
        if not self.bucket.has(step):
            raise UserError(
                f"the last checkpoint, of update {step}, could not be copied to "
                f"{self.bucket.url} ({self.reason}): fix that, and give the same "
                f"command again; it goes on from {self.bucket.folder} on this machine, "
                f"from update {max(self.bucket.index, default=0)} on another"
            )

    def fetch(self, step: int, items: Iterable[str]) -> None:
        """Downloads items of a checkpoint that the folder lacks; raises Damaged."""
        self.bucket.fetch_checkpoint(step, items)

    def forget(self, steps: Iterable[int]) -> None:
        """Treats the copies of damaged checkpoints as absent."""
        self.bucket.forget(steps)


def of(workdir: Path) -> Uploader | None:
    """Returns the uploader of a workdir on gs://, None for a local one."""
    bucket = buckets.of(workdir)
    return Uploader(bucket) if bucket else None
