"""Settings of the site, which launch/docs.sh builds of README.md, docs/ and what they link to."""

import re
from typing import Any

import hvdtrain

project = html_title = "hvdtrain"
author = "the hvdtrain authors"
copyright = f"{author}, Apache License 2.0"
version = release = hvdtrain.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*.rst", "examples/*.md", "benchmarks/results/**/report.md"]
suppress_warnings = ["toc.not_included"]  # reports of benchmarks, which pages link to
myst_heading_anchors = 4
autodoc_member_order = "bysource"
default_role = "code"  # docstrings have single backticks, as Markdown

html_theme = "furo"
pygments_style = "default"  # colours what a diff adds, too
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False

CONTENTS = {
    "Start": "docs/install docs/gpu examples/README",
    "Your own model": "docs/trainer docs/own_loops docs/migration docs/keras_support",
    "Data": "docs/data",
    "Many hosts": "docs/clusters docs/backends docs/update_rules docs/asynchronous",
    "Large models": (
        "docs/parallel docs/zero docs/tensor_parallel docs/pipeline_parallel docs/context_parallel docs/experts"
    ),
    "After training": "docs/after_training docs/export",
    "Reliability": "docs/reliability docs/troubleshooting",
    "Benchmarks": "docs/performance docs/benchmarks",
    "Reference": "docs/reference docs/options",
    "Contributing": "CONTRIBUTING docs/design docs/horovod CHANGELOG SECURITY",
}


def setup(app: Any) -> None:
    """Append the site's contents to README.md, where a forge would show them as text, and link pages in docstrings."""
    app.connect("source-read", _append_contents)
    app.connect("autodoc-process-docstring", _link_pages)


def _append_contents(app: Any, name: str, source: list[str]) -> None:
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            entries = "\n".join(f"/{page}" for page in pages.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def _link_pages(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [re.sub(r"\bdocs/(\w+)\.md\b", r":doc:`/docs/\1`", line) for line in lines]
