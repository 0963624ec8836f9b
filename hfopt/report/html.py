"""One self-contained page: style, charts and their library inside the file, readable in light and dark and at phone width.

Nothing a config or a log says reaches the page unescaped: text goes through `html.escape`, charts through plotly's JSON, which escapes `<`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hfopt.errors import HfoptError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --panel: #f6f8fa; --line: #d0d7de; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --panel: #161b22; --line: #3d444d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 1.25rem; } .tile span { color: var(--soft); font-size: .8rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; } code { font-size: .875em; }
.chart { height: 24rem; margin: .5rem 0; } @media (max-width: 40rem) { body { font-size: 15px; padding: .6rem; } .chart { height: 20rem; } }
"""

_THEME = """
const hfoptTheme = () => {
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ink = colour('--ink'), line = colour('--line');
  for (const chart of document.querySelectorAll('.js-plotly-plot')) {
    const update = {'font.color': ink};
    for (const axis of Object.keys(chart._fullLayout || {}).filter(k => /^[xy]axis\\d*$/.test(k)))
      Object.assign(update, {[axis + '.gridcolor']: line, [axis + '.zerolinecolor']: line, [axis + '.linecolor']: line});
    Plotly.relayout(chart, update);
  }
};
addEventListener('load', hfoptTheme);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', hfoptTheme);
"""


def figure() -> Figure:
    """An empty chart in the page's style."""
    try:
        import plotly.graph_objects as go
    except ModuleNotFoundError as error:
        raise HfoptError("the HTML page needs plotly, which is not installed", hint="pip install 'hfopt[report]'") from error
    layout = go.Layout(
        template="none",
        colorway=PALETTE,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 56, "r": 16, "t": 16, "b": 48},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        hoverlabel={"bgcolor": "#161b22", "font": {"color": "#e6edf3"}},
    )
    return go.Figure(layout=layout)


def chart(drawn: Figure, *, label: str) -> str:
    """A chart as a piece of the page; `label` is what a screen reader says."""
    from plotly.io import to_html

    body = to_html(drawn, full_html=False, include_plotlyjs=False, config={"responsive": True, "displayModeBar": False})
    return f'<div class="chart" role="img" aria-label="{html.escape(label)}">{body}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cells(tag: str, values: Sequence[object]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values) + "</tr>"

    body = "".join(cells("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{cells("th", head)}</thead><tbody>{body}</tbody></table></div>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Big figures with a small caption each."""
    inner = "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(caption)}</span></div>' for value, caption in pairs)
    return f'<div class="tiles">{inner}</div>'


def paragraph(text: str, *, css: str = "") -> str:
    return f'<p class="{css}">{html.escape(text)}</p>' if css else f"<p>{html.escape(text)}</p>"


def section(title: str, *pieces: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{''.join(pieces)}</section>"


def page(title: str, *pieces: str) -> bytes:
    """The whole file."""
    from plotly.offline import get_plotlyjs

    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head>"
        f"<body><h1>{html.escape(title)}</h1>{''.join(pieces)}<script>{_THEME}</script></body></html>"
    ).encode()
