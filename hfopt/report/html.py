"""One self-contained page: style, charts and their library inside the file, readable in light and dark and at phone width.

Nothing a config or a log says reaches the page unescaped: text goes through `html.escape`, charts are JSON with `<` escaped, in script
elements that the browser does not run. plotly's library is packed (gzip, base64: 1.9 MB instead of 4.8) and unpacked by the browser.
"""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hfopt.errors import HfoptError
from hfopt.redact import printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #fff; --panel: #f6f8fa; --line: #d0d7de;
  --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --paper: #0d1117; --panel: #161b22; --line: #3d444d; --good: #3fb950; --bad: #f85149; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; overflow-wrap: anywhere; } .soft { color: var(--soft); font-size: .875rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 1.25rem; line-height: 1.3; } .tile span { color: var(--soft); font-size: .8rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: break-word; }
th { color: var(--soft); font-weight: 600; } td.better { color: var(--good); } td.worse { color: var(--bad); }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .6rem; overflow-x: auto; font-size: .85rem; }
.chart { height: 22rem; margin: .5rem 0; }
.overview { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.3fr); gap: 1rem; align-items: start; }
.overview .verdict { font-size: 1.1rem; font-weight: 600; } .overview .chart { height: 20rem; margin: 0; }
.overview ul { list-style: none; margin: .5rem 0; padding: 0; font-size: .9rem; }
.overview li { padding: .2rem 0; overflow-wrap: anywhere; }
.overview li b { font-weight: 600; } .warning { color: var(--bad); }
@media (max-width: 40rem) {
  .overview { grid-template-columns: minmax(0, 1fr); gap: .25rem; } .overview .chart { height: 15rem; } .overview li { padding: .1rem 0; }
  body { font-size: 15px; padding: .6rem; } .chart { height: 20rem; } th, td { padding: .35rem .4rem; }
  .stack thead { display: none; } .stack tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .stack td { display: block; border: 0; padding: .1rem 0; } .stack td:not([data-head=""])::before { content: attr(data-head) ': ';
    color: var(--soft); } }
"""

_DRAW = """
const charts = [...document.querySelectorAll('.chart')];
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = () => {
  const ink = colour('--ink'), line = colour('--line');
  for (const chart of charts) {
    const update = {'font.color': ink, 'hoverlabel.bgcolor': colour('--panel'), 'hoverlabel.font.color': ink};
    for (const axis of Object.keys(chart._fullLayout).filter(key => /^[xy]axis\\d*$/.test(key)))
      Object.assign(update, {[axis + '.gridcolor']: line, [axis + '.zerolinecolor']: line, [axis + '.linecolor']: line});
    Plotly.relayout(chart, update);
  }
};
const draw = async () => {
  const packed = Uint8Array.from(atob(document.getElementById('plotly').textContent), sign => sign.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  const library = document.createElement('script');
  library.textContent = await new Response(unpacked).text();
  document.head.append(library);
  for (const chart of charts) {
    const {data, layout} = JSON.parse(chart.querySelector('script').textContent);
    await Plotly.newPlot(chart, data, layout, {responsive: true, displayModeBar: false});
  }
  paint();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', paint);
  document.body.dataset.drawn = charts.length;
};
if (!charts.length) document.body.dataset.drawn = 0;
else if ('DecompressionStream' in window) draw();
else for (const chart of charts) chart.textContent = 'The charts need a browser of 2023 or later; the tables say the same.';
"""


_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"  # what is in the page, and no address at all


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
        margin={"l": 56, "r": 16, "t": 24, "b": 48},
        legend={"orientation": "h", "y": 1.08, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        showlegend=True,
        hovermode="x unified",
        xaxis={"automargin": True},
        yaxis={"automargin": True},
    )
    return go.Figure(layout=layout)


def _escaped(text: str) -> str:
    return html.escape(printable(text))


class Layer(NamedTuple):
    """One colour of a stacked area."""

    name: str
    colour: str
    y: Sequence[float]


def stack(drawn: Figure, x: Sequence[float], layers: Iterable[Layer], *, shape: str, hover: str) -> None:
    """Areas upon each other; steps, because each value holds until the next (`hv`) or since the one before (`vh`)."""
    for layer in layers:
        style = {"width": 0.5, "color": layer.colour, "shape": shape}
        drawn.add_scatter(x=x, y=layer.y, name=layer.name, stackgroup="all", mode="lines", line=style, hovertemplate=hover)


def limit(drawn: Figure, y: float, text: str) -> None:
    """A line not to be crossed."""
    annotation = {"text": text, "font": {"color": PALETTE[3]}, "xanchor": "right", "yanchor": "bottom"}
    drawn.add_hline(y=y, line={"dash": "dash", "color": PALETTE[3]}, annotation=annotation)


def in_chart(text: str) -> str:
    """Text of others inside a chart: plotly would read tags in it."""
    return html.escape(printable(text), quote=False)


def chart(drawn: Figure, *, label: str) -> str:
    """A chart as a piece of the page; `label` is what a screen reader says."""
    data = drawn.to_json().replace("<", "\\u003c")
    return f'<div class="chart" role="img" aria-label="{_escaped(label)}"><script type="application/json">{data}</script></div>'


class Toned(NamedTuple):
    """A cell that is coloured: `better`, `worse` or plain."""

    text: str
    tone: str


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, stack: bool = False) -> str:
    """With `stack` a phone shows each row as a block, for cells that hold sentences."""
    heads = "".join(f"<th>{_escaped(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(_cell(name, value) for name, value in zip(head, row, strict=True))}</tr>" for row in rows)
    css = ' class="stack"' if stack else ""
    return f'<div class="scroll"><table{css}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(head: str, value: object) -> str:
    text, tone = value if isinstance(value, Toned) else (str(value), "")
    css = f' class="{tone}"' if tone else ""
    return f'<td data-head="{_escaped(head)}"{css}>{_escaped(text)}</td>'


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Big figures with a small caption each."""
    inner = "".join(f'<div class="tile"><b>{_escaped(value)}</b><span>{_escaped(caption)}</span></div>' for value, caption in pairs)
    return f'<div class="tiles">{inner}</div>'


def paragraph(text: str, *, css: str = "") -> str:
    return f'<p class="{css}">{_escaped(text)}</p>' if css else f"<p>{_escaped(text)}</p>"


def code(text: str) -> str:
    """A command, to be copied."""
    return f"<pre>{_escaped(text)}</pre>"


def overview(left: str, right: str) -> str:
    """What is seen first: two columns, on a phone one below the other."""
    return f'<div class="overview"><div>{left}</div><div>{right}</div></div>' if right else f"<div>{left}</div>"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A short list of names with their values."""
    return f"<ul>{''.join(f'<li><b>{html.escape(name)}</b> {html.escape(value)}</li>' for name, value in rows)}</ul>"


def section(title: str, *pieces: str) -> str:
    return f"<section><h2>{_escaped(title)}</h2>{''.join(pieces)}</section>"


def page(title: str, *pieces: str) -> bytes:
    """The whole file; the library is in it only where there is a chart."""
    body = "".join(pieces)
    library = f'<script type="application/octet-stream" id="plotly">{_packed_plotly()}</script>' if 'class="chart"' in body else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{_escaped(title)}</h1>{body}{library}<script>{_DRAW}</script></body></html>"
    ).encode(errors="replace")  # a log may hold half a character


def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
