"""The documentation site: `sphinx-build -W -b html docs docs/_build/html`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import txl_jax  # noqa: E402

# Read the Docs builds `latest` from the main branch and a version of the site for each
# tag, puts the version's name into the environment, and adds a menu of versions.

project = "txl_jax"
release = txl_jax.__version__
version = os.environ.get("READTHEDOCS_VERSION_NAME", release)
author = "the authors of txl_jax"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "directives",
]
exclude_patterns = ["_build", "figures/*.py", "generate"]

# Pages

myst_enable_extensions = [
    "attrs_block",
    "dollarmath",
    "amsmath",
    "colon_fence",
    "deflist",
]
myst_heading_anchors = 3
suppress_warnings: list[str] = []

# Formulas need no network: the site contains MathJax, as one file, without fonts.

spec = find_spec("mathjax")  # from the distribution django-static-mathjax
assert spec and spec.origin, "pip install -e '.[docs]'"
MATHJAX = f"{Path(spec.origin).parent}/static/mathjax/es5/tex-svg.js"
mathjax_path = "tex-svg.js"

# The reference of the Python API: docstrings write `code` in single backticks.

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

highlight_language = "none"

# Look

html_theme = "sphinx_book_theme"
html_title = f"txl_jax {version}"
html_baseurl = os.environ.get("READTHEDOCS_CANONICAL_URL", "")
html_static_path = ["_static", MATHJAX]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    # The table of claims needs the width.
    "secondary_sidebar_items": {"**": ["page-toc"], "results": []},
    "use_download_button": False,
    "use_fullscreen_button": False,
}
copybutton_exclude = ".linenos, .gp"
copybutton_prompt_text = "$ "

# `sphinx-build -b linkcheck` skips addresses that refuse robots or have no page.
linkcheck_ignore = [r"https://dl\.acm\.org/.*", r"http://localhost.*"]
linkcheck_timeout = 20
linkcheck_retries = 2
