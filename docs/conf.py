"""How Sphinx builds the pages of this folder: `make docs` writes them to build/docs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import amp_ext  # noqa: E402, it may stand beside this folder without being installed

project = "amp_ext"
author = "amp_ext authors"
copyright = "amp_ext authors"
version = release = amp_ext.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"amp_ext {release}"
html_show_copyright = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]

# Every page is plain Markdown that reads well on its own; directives only include and document.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Names that do not link: the site is built without the network, so it knows amp_ext's alone.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|collections|typing|enum|abc|contextlib|os)\..*"),
    (r"py:class", r"[A-Z]\w*(Error|Warning)|bool|dict|float|int|list|str|tuple|None"),
    # Classes of other packages, of the compiled module, and those that users do not need.
    (r"py:class", r"Table|Tensor|amp_ext\._C\..*|ops\.[A-Z]\w*|amp_ext\.optim\.transport\..*"),
]
