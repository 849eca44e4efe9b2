"""Published validation curves, beside which a run's validations are reported."""

import importlib
import json
import math
import operator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from txl_jax.errors import UserError, nearest
from txl_jax.report.checksum import DAMAGE
from txl_jax.report.log import say
from txl_jax.runtime.storage import regular

FAR = 0.1  # relative distance of a perplexity that is reported as far off


class Curve(NamedTuple):
    """Perplexities of the validation split by step, with their standard deviations."""

    source: str
    steps: list[int]
    ppl: list[float]
    spread: list[float]  # 0 = not published

    def at(self, step: int) -> tuple[float, float] | None:
        """Returns (perplexity, spread) at a step, or None outside the published range.

        Between two published steps, the logarithm of the perplexity and the spread are
        interpolated linearly in the logarithm of the step.
        """
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        x, known = math.log(step), np.log(self.steps)
        ppl = math.exp(np.interp(x, known, np.log(self.ppl)))
        if all(self.spread):
            return ppl, float(np.interp(x, known, self.spread))
        return ppl, dict(zip(self.steps, self.spread, strict=True)).get(step, 0.0)

    def report(self, step: int, valid_nll_nats: float) -> None:
        """Prints the published perplexity beside the run's, and warns if it is far."""
        if (expected := self.at(step)) is None:
            return
        ppl, spread = expected
        published = f"{ppl:.2f}" + (f" ± {spread:.2f}" if spread else "")
        measured = math.exp(min(valid_nll_nats, 100.0))
        say(
            f"update {step}: valid perplexity {measured:.2f}, expected {published} here"
        )
        if abs(math.log(measured / ppl)) > math.log(1 + FAR):
            say(
                f"the validation perplexity is more than {FAR:.0%} away from the "
                f"published one ({self.source}): compare config and corpus"
            )


NO_CURVE = Curve("", [], [], [])


def load(name: str) -> Curve:
    """Returns the curve of a JSON file or of a packaged name; "" has no points.

    Raises UserError if there is no such curve.
    """
    if not name:
        return NO_CURVE
    path = Path(name).expanduser()
    if path.suffix != ".json":
        folder = importlib.import_module("txl_jax.experiments").__path__[0]
        paths = sorted(Path(folder, "curves").glob("*.json"))
        known = {path.stem: path for path in paths}
        if name not in known:
            raise UserError(
                f"train.expected_curve = {name!r} must be one of {', '.join(known)}"
                f"{nearest(name, known)}, or the path of a .json file"
            )
        path = known[name]
    try:
        saved = json.loads(regular(path).read_text("utf-8-sig"))
        points = sorted(
            (operator.index(p["step"]), float(p["valid_ppl"]), float(p["spread"]))
            for p in saved["points"]
        )
        steps, ppl, spread = map(list, zip(*points, strict=True))
        if not 0 < min(steps) <= max(steps) < 2**31 or len({*steps}) < len(steps):
            raise ValueError("its steps are not distinct and from 1 to 2^31")
        if not all(0 < x < math.inf and 0 <= y < math.inf for _, x, y in points):
            raise ValueError("it has perplexities or spreads that are not positive")
        return Curve(str(saved["source"]), steps, ppl, spread)
    except (OSError, *DAMAGE) as error:
        raise UserError(
            f"train.expected_curve = {name!r} cannot be read ({error!r}): compare "
            "experiments/curves/wt103_nvidia.json"
        ) from error
