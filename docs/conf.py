"""How Sphinx, with numpydoc, builds these pages: ``make docs``."""

import sys
from pathlib import Path

from docutils import nodes

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


def shorten_names_of_files(app, doctree):
    """Remove from the diffs that pages include the folder in which the project is."""
    folder = f"{Path(__file__).resolve().parent.parent}/"
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.astext().replace(f"--- {folder}", "--- ").replace(f"+++ {folder}", "+++ ")
            block.replace(block.children[0], nodes.Text(text))
            block.rawsource = text


def setup(app):
    app.connect("doctree-read", shorten_names_of_files)
