"""Sphinx's settings. `make docs` calls docs/site/build.py, which gathers the pages and runs Sphinx over them."""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.nodes import make_refnode

import exogym

project, author, copyright = "ExoGym", "ExoGym contributors", "ExoGym contributors, MIT license"
version = release = exogym.__version__
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # types in signatures are short names, of which there may be two
smartquotes = False  # "fp32" is code as often as not
add_module_names = False
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"ExoGym {version}"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
html_show_sphinx = False
html_copy_source = False
pygments_style, pygments_dark_style = "tango", "monokai"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f6f8b", "color-brand-content": "#1f6f8b"},
    "dark_css_variables": {"color-brand-primary": "#6cc5dd", "color-brand-content": "#6cc5dd"},
}
# Mathematics as MathML, which browsers draw by themselves: nothing is loaded to view it.
html_math_renderer = "mathml"


def _inline(self: Any, node: Any) -> None:
    self.body.append(f'<span class="math">{tex2mathml(node.astext(), as_block=False)}</span>')
    raise nodes.SkipNode


def _block(self: Any, node: Any) -> None:
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


CLASS = re.compile(r"^class (\w+)", re.M)


def _link_names(app: Any, doctree: Any, page: str) -> None:
    """Make a link of each public class that a page names in backticks, where there is one of that name.

    A page that defines a class of that name means its own.
    """
    own = {name for code in doctree.findall(nodes.literal_block) for name in CLASS.findall(code.astext())}
    found: dict[str, list[tuple[str, Any]]] = {}
    for full, entry in app.env.domains.python_domain.objects.items():
        if entry.objtype in ("class", "exception"):
            found.setdefault(full.rpartition(".")[2], []).append((full, entry))
    for literal in list(doctree.findall(nodes.literal)):
        entries = found.get(literal.astext(), [])
        if (
            len(entries) == 1
            and literal.astext() not in own
            and not isinstance(literal.parent, nodes.reference | nodes.title)
        ):
            ((full, entry),) = entries
            link = make_refnode(app.builder, page, entry.docname, entry.node_id, [literal.deepcopy()], full)
            literal.replace_self(link)


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("doctree-resolved", _link_names)
