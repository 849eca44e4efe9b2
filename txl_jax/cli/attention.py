"""The mode `attention`: maps of the attention of each head, and a page to view them."""

from pathlib import Path
from typing import Any

from txl_jax.cli.prepare import prepare
from txl_jax.evaluate import attention_map, attention_page
from txl_jax.runtime import distributed
from txl_jax.workdir.load import Loaded
from txl_jax.workdir.staging import Staging


def run(loaded: Loaded, workdir: Path) -> dict[str, Any]:
    """Maps the attention over part of a split; writes pictures and a page."""
    config, split = loaded.config, loaded.config.eval.split
    tokens = prepare(config.data).split(split)
    model, options = (config.model, loaded.params), (config.attention, config.eval)
    maps = attention_map.make_maps(*model, tokens, *options)
    result = {"step": loaded.step, "split": split, **attention_map.summarize(maps)}
    if distributed.is_first():
        title = f"Attention of {workdir.name}, step {loaded.step}"
        with Staging(workdir) as staging:
            page = tokens, loaded.vocab.decode, staging.folder, title
            names = attention_page.write_files(maps, *page)
        result["files"] = {kind: str(workdir / name) for kind, name in names.items()}
    return result
