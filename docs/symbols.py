"""Symbols in sentences, typeset on the site: r, S and τ in italics, B0 and B_noise
with an index. The pages have plain text.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.writers.html5 import HTML5Translator

LETTER = re.compile(
    r"(?<![\w.'’&;-])(r|B|S|T|k|n|m|τ|[σμ]²|[σμ]̄²)(?![\w'’(&-]|\.\w|/[A-Za-z]{2})"
)
INDEXED = re.compile(r"\bB_(noise)\b|\bB(0)\b|\b([gmuw])_([it])\b")
VERBATIM = (
    nodes.literal,
    nodes.literal_block,
    nodes.math,
    addnodes.desc_signature,
    nodes.raw,
    nodes.comment,
)


def typeset(text: str) -> str:
    """Mark the symbols of a piece of HTML without tags."""
    text = LETTER.sub(r"<em>\1</em>", text)
    return INDEXED.sub(
        lambda m: f"<em>{m[3] or 'B'}</em><sub>{m[1] or m[2] or m[4]}</sub>",
        text,
    )


class Typesetter(HTML5Translator):
    """Writes HTML with symbols marked, except in code. The search sees the plain
    text.
    """

    def visit_Text(self, node: Any) -> None:
        begin = len(self.body)
        super().visit_Text(node)
        parent = node.parent
        while parent is not None:
            if isinstance(parent, VERBATIM):
                return
            parent = parent.parent
        self.body[begin:] = map(typeset, self.body[begin:])
