"""One file per experiment: `config.default()` and the differences."""
