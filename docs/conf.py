"""Sphinx's settings for the documentation site: ``make docs`` builds it into
build/docs.

The source folder is the repository's root, so that relative links between README.md,
CONTRIBUTING.md, benchmarks/README.md and the pages in docs/ work on the site and on a
code host alike.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from ray_adascale import __version__

sys.path.insert(0, str(Path(__file__).parent))
import commands
import messages
import names
import notebook
import symbols

project = "ray_adascale"
copyright = "the ray_adascale authors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "README"
# a stored notebook is read as Markdown (read_notebook)
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/**.md",
    "docs/**.md",
    "examples/tutorial.ipynb",
]
exclude_patterns = [".*", "build", "dist", "runs", "ray_adascale", "tests"]

myst_heading_anchors = 3
myst_links_external_new_tab = False

# Links and references: `make docs` treats each warning as an error (-W), and each
# unresolved reference as a warning (-n).
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpick_ignore_regex = [
    # Other projects' names: looking them up would need their sites at build time.
    (
        r"py:.*",
        r"(accelerate|collections|lightning|numpy|os|pathlib|ray|rich|torch|transformers)\..*",
    ),
    # Words of torch's own docstrings, which OSS and ShardedDataParallel inherit, and
    # attributes that an __init__ sets. ScalingRule is an alias of a type, which has no
    # page. A Search names types that are imported for type checkers alone.
    (
        r"py:class",
        r"Module|Optimizer|Path|optional|ScalingRule|BatchSplit|WorkloadFn|ScalingConfig|TrialScheduler|Callback"
        # As autodoc names them when a build reads only the pages that changed.
        r"|nn\.Module|LRScheduler|ExampleSampler|Backend",
    ),
    (r"py:attr", r"[a-z_]+"),
    # Modules that are not part of the public interface; their names appear in type
    # annotations.
    (r"py:.*", r"ray_adascale\.[\w.]+\.\w+"),
]
python_use_unqualified_type_names = True

html_theme = "furo"
highlight_language = "none"  # a block without a language is plain text
pygments_style = "default"
pygments_dark_style = "monokai"
html_title = f"ray_adascale {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
smartquotes = False  # an option is --grad-clip, and a message is what is printed
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
# else the options on the lines below a command are left out
copybutton_line_continuation_character = "\\"
copybutton_selector = "div:not(.highlight-diff) > div.highlight > pre"


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    """Append a table of contents to README.md: one for each section of
    docs/contents.md, the only list of the pages.
    """
    if docname != root_doc:
        return
    contents = Path(__file__).with_name("contents.md")
    app.env.note_dependency(str(contents))
    for section in contents.read_text(encoding="utf-8").split("\n## ")[1:]:
        group, _, pages = section.partition("\n")
        names = [
            f"/docs/{name}"
            for name in re.findall(
                r"^- \[.+\]\((.+)\.(?:md|ipynb)\)$", pages, flags=re.MULTILINE
            )
        ]
        source[0] += "\n".join(
            ["\n\n```{toctree}", ":hidden:", f":caption: {group}", "", *names, "```\n"]
        )


def read_notebook(app: Any, docname: str, source: list[str]) -> None:
    """Read a stored notebook as Markdown. Nothing is run."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        title, _, rest = notebook.markdown(source[0]).partition("\n")
        source[0] = (
            f"{title}\n\n{{download}}`The notebook as a file <{path.name}>`\n{rest}"
        )


def add_generated(app: Any, docname: str, source: list[str]) -> None:
    """Append what is made from the package's source to its page: the commands, and
    the texts of errors and warnings.
    """
    made = {
        "docs/reference/api/index": names.table,
        "docs/reference/commands": commands.page,
        "docs/reference/messages": messages.page,
    }
    if docname in made:
        source[0] += made[docname]()


def write_messages(app: Any) -> None:
    """Write the texts of messages for the search page."""
    if app.builder.format == "html":
        folder = Path(app.outdir, "_static")
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, "messages-texts.js").write_text(
            messages.script(), encoding="utf-8"
        )


def add_scripts(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let the search page find messages by a pasted text."""
    if pagename == "search":
        app.add_js_file("messages-texts.js")
        app.add_js_file("messages.js")


OUTSIDE = (
    "docs/contents",
    "docs/reference/messages",
    "docs/reference/architecture",
    "docs/reference/api/compat",
)
"""Pages that others link to, without a place in the navigation."""


def leave_out(app: Any, docname: str, source: list[str]) -> None:
    """Leave some pages out of the navigation, and the studies' pages, which the page
    of results links, out of the search too.
    """
    if docname.startswith("benchmarks/studies/"):
        source[0] = f"---\norphan: true\nnosearch: true\n---\n\n{source[0]}"
    elif docname in OUTSIDE:
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def keep_colons(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Start a property's docstring with an empty comment: napoleon would read text
    before a colon in its first line as a type.
    """
    if what in ("property", "attribute", "data"):
        lines[:0] = ["..", ""]


def copy_front_page(app: Any, exception: Exception | None) -> None:
    """Make README.html the page that a browser shows for the folder, too."""
    if exception is None and app.builder.format == "html":
        shutil.copy(
            Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html")
        )


def setup(app: Any) -> None:
    app.set_translator("html", symbols.Typesetter)
    app.connect("source-read", add_navigation)
    app.connect("source-read", read_notebook)
    app.connect("source-read", add_generated)
    app.connect("source-read", leave_out)
    app.connect("builder-inited", write_messages)
    app.connect("html-page-context", add_scripts)
    # before napoleon, at 500
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("build-finished", copy_front_page)
