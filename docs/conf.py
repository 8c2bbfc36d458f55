"""How Sphinx, with numpydoc, builds these pages: ``make docs``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import synkhronos

project = "Synkhronos"
version = release = synkhronos.__version__
copyright = "the Synkhronos contributors"

extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
exclude_patterns = ["_build"]
default_role = "code"  # in docstrings, `name` is an argument or a name of the code

autodoc_typehints = "none"  # the docstrings contain the types
numpydoc_show_class_members = False  # autodoc lists them
numpydoc_xref_param_type = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Data-parallel Theano on all the cores or GPUs of one machine",
    "page_width": "62em",
    "sidebar_width": "13em",
}
html_sidebars = {"**": ["about.html", "navigation.html", "searchbox.html"]}
html_show_copyright = False
