"""Sphinx's settings. The source folder is the root of the repository, so that every relative link means what it means
on GitHub."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

project = "nano-serving"
html_title = "nano-serving"
copyright = "the authors of nano-serving. Apache-2.0"

extensions = ["myst_nb", "sphinx_copybutton", "chapters.book.extension"]
root_doc = "chapters/index"
include_patterns = [
    "chapters/*.md",
    "chapters/book/pages/*.md",
    "chapters/*.ipynb",
    "*.md",
    "phase0_request/tiny_chat/README.md",
]
exclude_patterns = [".*", "build", "workspace", "chapters/figures", "chapters/results"]
templates_path = ["templates"]

myst_heading_anchors = 4  # GitHub's anchors
nb_execution_mode = "off"  # outputs as they are committed
nb_merge_streams = True

html_theme = "furo"
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["book.css", "tab/tab.css"]
html_js_files = [("tab/book.js", {"type": "module"})]
html_copy_source = False
html_show_sphinx = False
html_additional_pages = {"index": "index.html"}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d6996", "color-brand-content": "#1d6996"},
    "dark_css_variables": {"color-brand-primary": "#7cc0e0", "color-brand-content": "#7cc0e0"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

copybutton_exclude = ".linenos, .gp, .go"
