"""The docs site: Sphinx with MyST, furo and executed notebooks; `make docs` builds it, offline, without a warning."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "_ext")]
os.environ["JAX_PLATFORMS"] = "cpu"  # of this process and of the notebooks' kernels

import pagedjax  # noqa: E402

project = "pagedjax"
copyright = "the pagedjax authors, Apache-2.0"
release = version = pagedjax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "pagedjax_site"]
exclude_patterns = ["_build"]
highlight_language = "text"  # of fences that name none: commands and what they print
# Names of code lead to the reference where it has them; which of all types it has is no rule to be broken.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_timeout = 600  # seconds of a cell: a machine may have other work
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_show_tb = True

# Docstrings are written in the words of Markdown: `name` is code, and Args, Returns and Raises are sections.
default_role = "code"
napoleon_use_ivar = True
napoleon_use_param = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
viewcode_line_numbers = True

html_theme = "furo"
html_title = "pagedjax"
html_extra_path = ["example"]  # twelve-chats.html, beside the site's pages
html_copy_source = False
html_show_sourcelink = False
