"""A page of figures from the results of `gpu.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fedguild.core.files import write_text
from fedguild.report.style import FULL_WIDTH, INK, MUTED, gridlines, ordered_colours, styled, to_svg

Entry = Mapping[str, Any]

TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>FedGuild on {{ results.device }}</title>
<style>body { font: 15px/1.5 sans-serif; max-width: 62em; margin: 2em auto; color: #1d2733 } svg { max-width: 100% }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 10px; text-align: right;
border-bottom: 1px solid #d5dbe1 } td:first-child, th:first-child { text-align: left } pre { font-size: 12px }</style>
</head><body>
<h1>FedGuild on {{ results.device }}</h1>
<p>{{ results.machine }}. Kernels: {{ results.kernels | join(", ") or "none" }}.
{% if results.published_flops_per_second %}Peak: {{ "%.0f" | format(results.published_flops_per_second / 1e12) }}
TFLOP/s (published, dense bf16); a large product reached
{{ "%.0f" | format(results.flops_per_second / 1e12) }}.{% endif %}
Random weights; a step is forward, backward and AdamW of all clients. Sequential peft is the sum of its clients' steps,
transformers the frozen model alone, forward and backward, once for each client.</p>
{% for layout, figures in layouts.items() %}<h2>{{ layout }}</h2>{% for figure in figures %}{{ figure }}{% endfor %}
{% endfor %}
<h2>Every case</h2>
<table><tr><th>case</th><th>ms a step</th><th>tokens/s</th><th>of peak</th><th>of a product</th><th>GB</th>
<th>times sequential peft</th></tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for name, script in results.scripts.items() %}<h2>{{ name }}.py ({{ script.outcome }},
{{ "%.0f" | format(script.seconds) }} s)</h2><pre>{{ script.output }}</pre>{% endfor %}
</body></html>
"""


def write_page(results: Mapping[str, Any], path: Path) -> Path:
    """Writes the page; returns its path."""
    entries = list(results["cases"].values())
    names = list(dict.fromkeys(entry["layout"] for entry in entries))
    layouts = {name: [Markup(svg) for svg in figures(name, place, entries)] for place, name in enumerate(names)}
    rows = [row_of(key, entry, entries) for key, entry in results["cases"].items()]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE)
    write_text(path, template.render(results=results, layouts=layouts, rows=rows))
    return path


def figures(layout: str, place: int, entries: Iterable[Entry]) -> Iterable[str]:
    """Yields a layout's figures: tokens a second, share of peak, and the gain over sequential peft."""
    own = [entry for entry in entries if entry["layout"] == layout and entry["outcome"] == "ok"]
    key = "share_of_peak" if any(entry.get("share_of_peak") for entry in own) else "share_of_measured"
    for number, (title, value, logs) in enumerate(
        (
            ("tokens per second", lambda entry: entry["tokens_per_second"], True),
            ("share of peak" if key == "share_of_peak" else "share of a product's rate", lambda e: e[key], False),
            ("times as fast as sequential peft", lambda entry: gain(entry, own), False),
        )
    ):
        yield figure(f"layout{place}-{number}", f"{layout}: {title}", own, value, logs)


def figure(key: str, title: str, entries: list[Entry], value: Any, logs: bool) -> str:
    """Returns one quantity over the tokens of a client, a line for each number of clients; unequal on the right."""
    with styled(key):
        drawing = Figure(figsize=(FULL_WIDTH, 3.2), layout="constrained")
        sides = drawing.subplots(1, 2, sharey=True)
        ours = [entry for entry in entries if entry["system"] == "ours"]
        clients = sorted({entry["clients"] for entry in ours})
        for axes, unequal in zip(sides, (False, True), strict=True):
            lines = {
                f"{number} clients": [e for e in ours if e["clients"] == number and is_unequal(e) is unequal]
                for number in clients
            }
            colours: list[str] = [*ordered_colours(len(lines)), MUTED, INK]
            if not unequal:
                lines |= {
                    name: [e for e in entries if e["system"] == name and list(e["budgets"][0]) == [20, 8]]
                    for name in ("peft", "transformers")
                }
            for (name, line), colour in zip(lines.items(), colours, strict=False):
                points = sorted((e["tokens"], value(e)) for e in line if value(e) is not None)
                if points:
                    style = "--" if name in ("peft", "transformers") else "-"
                    axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3.5, label=name)
            axes.set(xscale="log", xlabel="tokens of a client", title="unequal budgets" if unequal else "equal budgets")
            if logs:
                axes.set_yscale("log")
            sizes = sorted({entry["tokens"] for entry in entries})
            axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_minor_formatter(NullFormatter())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.6g}"))
            gridlines(axes)
            if axes.lines:
                axes.legend(frameon=False, fontsize=8)
        drawing.suptitle(title)
        return to_svg(drawing, key, f"Line chart: {title} over the tokens of a client.")


def is_unequal(entry: Entry) -> bool:
    """Whether the clients' budgets differ."""
    return len(entry["budgets"]) > 1


def gain(entry: Entry, entries: Iterable[Entry]) -> float | None:
    """Returns the time of the same clients one after the other with peft, over this one's; None if it is not known."""
    if entry["system"] in ("peft", "transformers") or entry["outcome"] != "ok":
        return None
    alone = {
        tuple(other["budgets"][0]): other["seconds"]
        for other in entries
        if other["system"] == "peft"
        and other["outcome"] == "ok"
        and (other["layout"], other["tokens"]) == (entry["layout"], entry["tokens"])
    }
    budgets = [tuple(entry["budgets"][client % len(entry["budgets"])]) for client in range(entry["clients"])]
    return sum(alone[budget] for budget in budgets) / entry["seconds"] if set(budgets) <= set(alone) else None


def row_of(key: str, entry: Entry, entries: Iterable[Entry]) -> list[str]:
    """Returns a case's cells."""
    if entry["outcome"] != "ok":
        return [key, entry.get("error", entry["outcome"]), "", "", "", "", ""]
    times, share = gain(entry, entries), entry["share_of_peak"]
    return [
        key,
        f"{1e3 * entry['seconds']:.1f}",
        f"{entry['tokens_per_second']:,.0f}",
        "" if share is None else f"{share:.1%}",
        f"{entry['share_of_measured']:.1%}",
        f"{entry['peak_bytes'] / 1e9:.1f}",
        "" if times is None else f"{times:.2f}",
    ]
