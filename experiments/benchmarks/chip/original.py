"""The original PyTorch code on the same device, from a user's checkout.

github.com/kimiyoung/transformer-xl, folder pytorch: `mem_transformer.MemTransformerLM`.

Dims: L segment, B streams.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.benchmarks import subject
from experiments.benchmarks.chip.measure import REPEATS, SECONDS, read_config
from experiments.benchmarks.record import Row
from txl_jax.evaluate.options import evaluation_model

WARM = 6  # calls: torch.compile compiles for an empty, a growing and a full memory


def load(folder: str) -> Any:
    """Returns the module of the model, adapted to newer versions of torch."""
    import torch

    # Masks of bytes are no longer accepted, and the softmax reads CUDA's version.
    torch.Tensor.byte = torch.Tensor.bool
    torch.version.cuda = torch.version.cuda or "0.0"
    sys.path[:0] = [folder, f"{folder}/utils"]
    import mem_transformer  # type: ignore[import-not-found]

    return mem_transformer


def prepare(part: Row) -> Callable[[], Row]:
    """Builds the model with random weights, and warms it up."""
    import torch

    config, task = read_config(part | {"kernel": "auto"}), part["task"]
    model, L, B = config.model, config.train.tgt_len, config.train.batch_size
    if task == "evaluate":
        model, L = evaluation_model(model, config.eval), config.eval.tgt_len
    network = load(part["original"]).MemTransformerLM(
        *(model.vocab_size, model.n_layer, model.n_head, model.d_model, model.d_head),
        *(model.d_inner, model.dropout, model.dropatt),
        d_embed=model.embed_size,
        div_val=model.div_val,
        tie_projs=[False, *(True for _ in model.cutoffs)],
        tgt_len=L,
        ext_len=0,
        mem_len=model.mem_len,
        cutoffs=[*model.cutoffs],
        same_length=model.same_length,
        clamp_len=model.clamp_len or -1,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    network.to(device).train(task == "train")
    run = torch.compile(network) if part["kernel"] == "torch.compile" else network
    optimizer = torch.optim.Adam(network.parameters(), lr=config.optim.lr)
    text = subject.zipf_text(model.vocab_size, L * B + 1).astype("int64")
    data_LB, target_LB = (
        torch.from_numpy(x.reshape(B, L).T.copy()).to(device)
        for x in (text[:-1], text[1:])
    )
    autocast = torch.autocast(
        device, dtype=torch.bfloat16, enabled=part["dtype"] == "bfloat16"
    )
    memory: list[Any] = []

    def call() -> None:
        nonlocal memory
        with torch.set_grad_enabled(task == "train"):
            with autocast:
                loss, *memory = run(data_LB, target_LB, *memory)
            if task == "train":
                optimizer.zero_grad()
                loss.float().mean().backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), config.optim.clip)
                optimizer.step()

    def seconds_of(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    seconds_of(WARM + -(-model.mem_len // L))  # then the memory is full
    torch.cuda.empty_cache()  # for the parts before this one

    def measure() -> Row:
        count = max(round(SECONDS / seconds_of(1)), 1)
        times = [seconds_of(count) for _ in range(REPEATS)]
        seconds = statistics.median(times)
        row: Row = {"L": L, "seconds": seconds, "tokens_per_second": L * B / seconds}
        row["spread"] = [round(each / seconds, 3) for each in times]
        if device == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
        return row | {"torch": torch.__version__}

    return measure
