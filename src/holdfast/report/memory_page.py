"""The page of a forecast: memory over one step by owner, every plan, and what was assumed, in one offline file."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.forecast.devices.catalogue import GIB
from holdfast.forecast.plan.forecasting import DevicePlan, Forecast
from holdfast.forecast.plan.planning import with_relative_times
from holdfast.forecast.trace.events import OWNERS, PHASES, events_played, live_by_owner
from holdfast.forecast.trace.shares import shares_of
from holdfast.report.figures import label
from holdfast.report.forecast_words import (
    COLUMNS,
    LEGEND,
    assumptions,
    cells,
    command_of,
    gib,
    named,
    sources,
    to_paste,
    verified,
    what_is_missing,
    what_to_take,
)
from holdfast.report.offline_page import as_html, fill_page, plot

# Okabe and Ito's palette, which can be distinguished with any kind of colour vision; in the order of `OWNERS`.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#f0e442", "#e69f00", "#999999", "#bbbbbb")
_LIMIT_COLOUR = "#d55e00"
_MOST_POINTS = 1000  # of each curve; the least and the most of each stretch are kept
_HEIGHT = 460


def render(forecast: Forecast, *, now: datetime | None = None) -> str:
    """Return the page of a forecast.

    Args:
        forecast: From `forecasting.make_forecast`.
        now: Time to write at its foot.

    Raises:
        PolicyError: H742, if plotly is not installed.
    """
    order = forecast.order
    return fill_page(
        name=order.factory.rpartition("/")[2],
        command=command_of(order),
        body="\n".join(_sections(forecast)),
        figures={f"memory-{number}": memory_figure(plan) for number, plan in enumerate(forecast.plans)},
        kicker="holdfast plan",
        now=now,
    )


def memory_figure(plan: DevicePlan) -> dict[str, Any]:
    """Return plotly's figure of what is alive over one step, stacked by owner, below what the device can give."""
    live = live_by_owner(plan.trace, plan.shown.optimizer)
    phases = plan.trace.event_phase[events_played(plan.trace, plan.shown.optimizer)]
    shown = thinned(live.sum(axis=0))
    texts = [PHASES[phases[max(0, event - 1)]] for event in shown.tolist()] if len(phases) else ["" for _ in shown]
    limit = (plan.question.device.available_bytes - plan.shown.margin_bytes) / GIB
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "live", "name": OWNERS[owner], "x": shown.tolist(),
            "y": (live[owner, shown] / GIB).round(5).tolist(), "line": {"width": 0.5, "color": _COLOURS[owner]},
            "hovertemplate": "%{y:.3f} GiB",
        }
        for owner in range(len(OWNERS))
        if live[owner].any()
    ]  # fmt: skip
    total = live[:, shown].sum(axis=0) / GIB
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": "all", "x": shown.tolist(), "y": total.round(5).tolist(),
            "text": texts, "line": {"width": 0}, "showlegend": False, "hovertemplate": "%{y:.3f} GiB, %{text}",
        }
    )  # fmt: skip
    ends = [0, int(shown[-1])] if len(shown) else [0, 1]
    data.append(
        {
            "type": "scatter", "mode": "lines", "name": label(f"{plan.question.device.name} less context and margin"),
            "x": ends, "y": [limit, limit], "line": {"width": 2, "color": _LIMIT_COLOUR, "dash": "dash"},
            "hovertemplate": "%{y:.3f} GiB",
        }
    )  # fmt: skip
    layout = {
        "height": _HEIGHT,
        "hovermode": "x unified",
        "margin": {"l": 74, "r": 18, "t": 20, "b": 44},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {"title": {"text": "allocations and frees of one step"}, "showspikes": True},
        "yaxis": {"rangemode": "tozero", "ticksuffix": " GiB", "zeroline": False},
    }
    return {"data": data, "layout": layout}


def thinned(total: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return which points to draw: of each stretch the first, the lowest and the highest.

    Args:
        total: Shape ``(events + 1,)``.
    """
    stretches = np.array_split(np.arange(len(total)), max(1, min(len(total), _MOST_POINTS // 3)))
    kept = [(part[0], part[total[part].argmin()], part[total[part].argmax()]) for part in stretches if len(part)]
    return (
        np.unique(np.array([*kept, (len(total) - 1,) * 3], dtype=np.int64)) if len(total) else np.zeros(0, np.int64)
    )


def _sections(forecast: Forecast) -> Iterable[str]:
    for number, plan in enumerate(forecast.plans):
        yield _recommended(forecast, plan)
        hint = as_html(f"{_played(plan)} Drag to zoom, double-click to see all; hover for the phase.")
        yield plot(f"Memory over one step: {as_html(plan.question.device.name)}", f"memory-{number}", hint)
        yield _owners(plan)
        yield _table(plan)
    items = "".join(f"<li>{as_html(text)}</li>" for text in assumptions(forecast.assumptions))
    yield f"<section><h2>What was assumed</h2><ul>{items}</ul></section>"


def _played(plan: DevicePlan) -> str:
    samples = max(1, plan.shown.micro_batch_size)
    more = ", the last two micro-batches of a step," if plan.trace.micro_batch_size < _total(plan) else ""
    return f"{named(plan.shown)}, micro-batch {samples}{more} as tensors hold it."


def _total(plan: DevicePlan) -> int:
    return plan.question.global_batch_size or plan.trace.micro_batch_size


def _recommended(forecast: Forecast, plan: DevicePlan) -> str:
    name = as_html(plan.question.device.name)
    if plan.best is None:
        text = as_html(what_is_missing(plan), lines=True)
        return f'<section class="verdict"><p class="kicker">{name}</p><pre>{text}</pre></section>'
    lines = as_html("\n".join(to_paste(forecast, plan.best)), most=20_000, lines=True)
    sure = "" if plan.verification is None else f'<p class="sure">{as_html(verified(plan.verification))}</p>'
    return (
        f'<section class="verdict well"><p class="kicker">Take on {name}</p>'
        f"<h2>{as_html(what_to_take(plan.best))}</h2><pre>{lines}</pre>{sure}</section>"
    )


def _owners(plan: DevicePlan) -> str:
    shares = shares_of(plan.trace, plan.shown.optimizer)
    rows = "".join(
        f'<tr><th>{title}</th><td class="text">{as_html(name)}</td><td class="number">{gib(size)}</td></tr>'
        for title, sizes in (("owner", shares.owners), ("module", shares.modules), ("line", shares.lines))
        for name, size in sizes.items()
    )
    return f"<section><h2>Who owns the peak</h2><table>{rows}</table></section>"


def _table(plan: DevicePlan) -> str:
    heads = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "".join(
        ('<tr class="taken">' if row is plan.best else "<tr>")
        + "".join(f'<td class="number">{as_html(cell)}</td>' for cell in cells(row, relative))
        + "</tr>"
        for row, relative in with_relative_times(plan.rows)
    )
    return (
        f'<section><h2>Every plan</h2><p class="hint">{as_html(LEGEND)}</p>'
        f'<div class="scroll"><table><tr>{heads}</tr>{rows}</table></div>'
        f'<p class="hint">Figures of the device: {as_html(sources(plan))}</p></section>'
    )
