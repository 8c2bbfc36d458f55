"""HTML tables, with which notebooks show objects of this package."""

from __future__ import annotations

import html
from typing import Iterable, Sequence

_STYLE = "text-align: left; vertical-align: top"
_ALIGNED = _STYLE + "; white-space: pre; font-family: monospace"  # of several lines, such as an array


def table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return a table of texts, which are escaped.

    Parameters
    ----------
    title : str
        The caption.
    rows : list of list
        One object per cell, written by `str`. The first cell of a row is its heading.
    header : list of str, optional
        The headings of the columns.
    """
    lines = [f'<table><caption style="{_STYLE}"><b>{html.escape(title)}</b></caption>']
    if header:
        lines.append("<thead><tr>" + "".join(_cell("th", one) for one in header) + "</tr></thead>")
    lines.append("<tbody>")
    for first, *others in rows:
        cells = [_cell("th", first), *(_cell("td", one) for one in others)]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _cell(tag: str, content: object) -> str:
    text = html.escape(str(content))
    style = _ALIGNED if "\n" in text else _STYLE
    return f'<{tag} style="{style}">{text}</{tag}>'
