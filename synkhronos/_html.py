"""Tables and pictures, with which notebooks show objects of this package."""

from __future__ import annotations

import base64
import html
import io
from abc import ABC, abstractmethod
from typing import Any, Iterable, List, Sequence, Tuple

_STYLE = "text-align: left; vertical-align: top"
#: The title of an object, and the rows of its table
Facts = Tuple[str, List[Tuple[object, ...]]]
_ALIGNED = _STYLE + "; white-space: pre; font-family: monospace"  # of several lines, such as an array


class Shown(ABC):
    """An object that is shown as a line, and in a notebook as a table."""

    @abstractmethod
    def _shown(self) -> Facts:
        """Return the title and the rows of the table."""

    def __repr__(self) -> str:
        return f"<{self._shown()[0]}>"

    def _repr_html_(self) -> str:
        return table(*self._shown())


def picture(figure: Any, title: str) -> str:
    """Return a figure of matplotlib as an element of HTML.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    title : str
        What it shows, for those who cannot see it.
    """
    with io.BytesIO() as file:
        figure.savefig(file, format="svg")
        code = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{code}" />'


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
        lines.append("<thead><tr>" + "".join(_cell("th", item) for item in header) + "</tr></thead>")
    lines.append("<tbody>")
    for first, *others in rows:
        cells = [_cell("th", first), *(_cell("td", other) for other in others)]
        lines.append("<tr>" + "".join(cells) + "</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _cell(tag: str, content: object) -> str:
    text = html.escape(str(content))
    style = _ALIGNED if "\n" in text else _STYLE
    return f'<{tag} style="{style}">{text}</{tag}>'
