"""The mode `attention`: maps of the attention of each head, and a page to view them."""

from pathlib import Path
from typing import Any

from txl_jax.data.preparation import prepare
from txl_jax.paper import attention_map, attention_page
from txl_jax.workdir.fit import warn_of_rotations
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.staging import writing


def run(loaded: Loaded, workdir: Path) -> dict[str, Any]:
    """Maps the attention over part of a split; writes pictures and a page."""
    config, split = loaded.config, loaded.config.eval.split
    tokens = prepare(config.data, loaded.vocab).split(split)
    warn_of_rotations(config, most=config.eval.mem_len)  # keys of every target
    model, options = (config.model, loaded.params), (config.attention, config.eval)
    maps = attention_map.make_maps(*model, tokens, *options)
    result = {"step": loaded.step, "split": split, **attention_map.summarize(maps)}
    title = f"Attention of {workdir.name}, step {loaded.step}"
    with writing(workdir, result) as folder:
        page = tokens, loaded.vocab.decode, folder, title
        names = attention_page.write_files(maps, *page)
        result["files"] = {kind: str(workdir / name) for kind, name in names.items()}
    return result
