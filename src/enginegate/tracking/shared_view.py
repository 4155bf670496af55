"""One saved view of MLflow's runs page for each qualification: its table and its charts.

MLflow 3 keeps a shared view as an experiment tag, and a link names it by its key: whoever opens the
link sees these columns and charts, whatever was last open in that browser. The keys of the state
were taken from MLflow 3.17 and tried in a browser; one that another version does not know is
ignored there. The page shows the table or the charts, never both: a view holds both, and the
buttons beside the search field switch.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from enginegate.tracking import metrics, summary

TAG = "mlflow.sharedViewState."
SECTION = "Decision"
# Widths in pixels: with MLflow's side panel open at 1440 x 900, all up to the rate is in sight.
_COLUMNS: Mapping[str, int] = {
    f"tags.`{summary.OUTCOME}`": 150,
    f"tags.`{summary.P99}`": 140,
    f"tags.`{summary.RATE}`": 90,
    f"tags.`{summary.CHANGE}`": 175,
    f"tags.`{summary.SIZE}`": 75,
    "params.`precision`": 80,
    f"params.`{summary.RUNTIME}`": 150,
}
# When a run was made says nothing here, and the page does not let its column go.
_CREATED = {"runDateAndNestInfo": 48}
# Four charts in a square, which fit below the page's own controls.
_GRID = {"columns": 2, "cardHeight": 265}
_MOST_RUNS = 30
# Past saturation latencies are a hundred times as long, and everything else would be a flat line.
_HEADROOM = 3.0


def view_state(run: str, named: Iterable[str], *, slowest_ms: float | None) -> str:
    """The view as JSON, for the tag.

    Args:
        run: the parent run, whose children are shown, the winner first.
        named: metrics of the children; charts of those that are not in the section are folded.
        slowest_ms: the largest p99 that met the SLO, which the latency curve's axis is made for;
            None: no curve was filed.
    """
    present = set(named)
    other = next((name for name in metrics.OTHER_CHANGES if name in present), None)
    change = metrics.CHANGE if metrics.CHANGE in present or other is None else other
    measure = "Accuracy change" if change == metrics.CHANGE else "Change of the task's score"
    charts = [
        _bar(metrics.P99, "p99 at the chosen rate, ms (lower is better)"),
        _bar(metrics.RATE, "Requests/s within the SLO (higher is better)"),
        _bar(change, f"{measure} against FP32 (0 is FP32)"),
        _line(metrics.CURVE, "p99, ms, by offered requests/s", top=_HEADROOM * slowest_ms)
        if slowest_ms is not None
        else _bar("size/engine_kib", "Engine size, KiB"),
    ]
    sections = sorted({name.rpartition("/")[0] for name in present})
    state: dict[str, Any] = {
        "searchFilter": f"tags.\"mlflow.parentRunId\" = '{run}'",
        "orderByKey": f"metrics.`{metrics.RANK}`",
        "orderByAsc": True,
        "selectedColumns": list(_COLUMNS),
        "columnOrder": [*_CREATED, *_COLUMNS],
        "columnWidths": {**_CREATED, **_COLUMNS},
        "compareRunSections": [
            _section(SECTION, shown=True),
            *(_section(name, shown=False) for name in sections),
        ],
        "compareRunCharts": charts,
        "isAccordionReordered": True,
        "viewMaximized": False,
        "runListHidden": False,
        "hideEmptyCharts": True,
    }
    return json.dumps(state, separators=(",", ":"))


def _section(name: str, *, shown: bool) -> dict[str, object]:
    return {
        "uuid": f"section-{name}",
        "name": name,
        "display": shown,
        "isReordered": True,
        "deleted": False,
        "isGenerated": not shown,
        **_GRID,
    }


def _bar(metric: str, title: str) -> dict[str, object]:
    return _chart("BAR", metric, title)


def _line(metric: str, title: str, *, top: float) -> dict[str, object]:
    drawn = {
        "selectedMetricKeys": [metric],
        "xAxisKey": "step",
        "displayPoints": True,
        "useGlobalLineSmoothing": False,
        "lineSmoothness": 0,
        "range": {"yMin": 0, "yMax": top},
    }
    return {**_chart("LINE", metric, title), **drawn}


def _chart(kind: str, metric: str, title: str) -> dict[str, object]:
    return {
        "uuid": f"chart-{metric}",
        "type": kind,
        "metricKey": metric,
        "dataAccessKey": metric,
        "displayName": title,  # 3.17 shows the metric's name in its place
        "metricSectionId": f"section-{SECTION}",
        "runsCountToCompare": _MOST_RUNS,
        "deleted": False,
        "isGenerated": False,
    }
