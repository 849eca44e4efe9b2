"""The port in PyTorch on the same device, eager and compiled: the same three tasks."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from experiments.benchmarks import peer, subject
from experiments.benchmarks.chip.plan import read
from experiments.benchmarks.quiet import clock
from txl_jax.evaluate.options import evaluation_model
from txl_jax.generate.options import generation_model

WARM = 3  # calls, in which torch.compile compiles for an empty and a full memory
LEAST = 2.0  # seconds to measure
TOKENS = 32  # that a call generates


def measure(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the port's tokens per second in one task, by the same config.

    The process does not use jax.
    """
    import torch

    config, task = read(part), part["task"]
    model, train, each = config.model, config.train, config.eval
    if task == "evaluate":
        model = evaluation_model(model, each)
    elif task == "generate":
        model = generation_model(model, config.generate)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    port = peer.Model(model, device, part["dtype"], part["mode"] == "compile")
    row: dict[str, Any] = {"versions": torch.__version__, "device": device}
    call: Callable[[], Any]
    if task == "train":
        port.make_optimizer(config.optim.lr, config.optim.clip)
        text_T = subject.zipf_text(model.vocab_size, train.batch_size * train.tgt_len)
        text_BL = text_T.reshape(train.batch_size, train.tgt_len)
        call, tokens = functools.partial(port.train, text_BL), text_T.size
        row["streams"] = train.batch_size
    elif task == "evaluate":
        tokens = 8 * each.streams * each.tgt_len
        text_BT = subject.zipf_text(model.vocab_size, tokens).reshape(each.streams, -1)
        call = functools.partial(port.evaluate, text_BT, each.tgt_len)
        row["streams"] = each.streams
    else:
        call, tokens = functools.partial(port.generate, TOKENS, 40), TOKENS
    row["first_seconds"] = clock(call)
    seconds = [clock(call) for _ in range(WARM)]
    yield row | {"tokens_per_second": tokens / seconds[-1]}
    timed = [clock(call)]
    while sum(timed) < LEAST:
        timed.append(clock(call))
    yield row | {"tokens_per_second": tokens * len(timed) / sum(timed)}
