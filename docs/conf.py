"""How Sphinx builds these pages: ``make docs``. Neither the build nor the pages need a network."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpydoc.xref
import synkhronos

# numpydoc would link these words to sections of manuals, which the inventories do not have.
PLAIN_WORDS = [
    word for word, link in numpydoc.xref.DEFAULT_LINKS.items() if link.startswith((":ref:", ":term:"))
]

project = "Synkhronos"
version = release = synkhronos.__version__
copyright = "the Synkhronos contributors"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # has MathJax and its fonts copied into the built pages
    "sphinx_copybutton",
    "numpydoc",
]
exclude_patterns = ["_build"]
default_role = "code"  # in docstrings, `name` is an argument or a name of the code
nitpicky = True  # every cross-reference must lead somewhere

autodoc_typehints = "none"  # the docstrings contain the types
autosummary_generate = False  # the tables link to the entries on the same page
numpydoc_show_class_members = False  # autodoc lists them
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # other words than these are not links
numpydoc_xref_aliases = {
    **{word: word for word in PLAIN_WORDS},
    **{name: f"synkhronos.{name}" for name in synkhronos.__all__ if name[0].isupper()},
    "bool": ":class:`python:bool`",
    "callable": ":obj:`callable`",  # without the parentheses of a call
    "numpy.ndarray": ":class:`numpy.ndarray`",
    "sequence": "collections.abc.Sequence",
}

# The inventories are part of the project, so that a build without a network gives the same links.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "numpy": ("https://numpy.org/doc/1.23", "inventories/numpy.txt"),
}

html_theme = "furo"
html_title = f"Synkhronos {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
highlight_language = "none"  # of blocks for which none is given
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"


class Picture(Directive):
    """``.. picture:: NAME``: ``pictures/NAME.*.svg``, as drawn by ``pictures/draw.py``.

    There is one drawing for light pages and one for dark pages. Their alternative text is the
    description in the drawing.
    """

    required_arguments = 1

    def run(self):
        """Return two images, of which a page shows the one that suits its colors."""
        images = []
        for shade in ("light", "dark"):
            name = f"pictures/{self.arguments[0]}.{shade}.svg"
            image = nodes.image(uri=f"/{name}", alt=description(HERE / name), align="center")
            image["classes"] = [f"only-{shade}", "picture"]
            images.append(image)
        return images


def description(picture):
    """Return the text in an SVG file's metadata that describes the drawing."""
    name = "{http://purl.org/dc/elements/1.1/}description"
    return ElementTree.parse(picture).find(f".//{name}").text


def shorten_names_of_files(app, doctree):
    """Remove from the diffs that pages include the folder in which the project is."""
    folder = f"{HERE.parent}/"
    for block in doctree.findall(nodes.literal_block):
        if block.get("language") == "udiff":
            text = block.astext().replace(f"--- {folder}", "--- ").replace(f"+++ {folder}", "+++ ")
            block.replace(block.children[0], nodes.Text(text))
            block.rawsource = text


def hide_constructor(app, what, name, obj, options, signature, return_annotation):
    """Show no arguments of the classes of steps, which scripts do not construct."""
    if what == "class" and name.startswith("synkhronos.extensions.train."):
        return "", None
    return None


def setup(app):
    app.add_directive("picture", Picture)
    app.connect("autodoc-process-signature", hide_constructor)
    app.connect("doctree-read", shorten_names_of_files)
