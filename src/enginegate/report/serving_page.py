"""Benchmarks as one interactive page: a file that needs no network and no other file.

Pictures are SVG and complete without a script; the script shows and hides candidates, and links
each point to its line in the table. Whatever comes from a model, a server or a policy is escaped.
"""

from collections.abc import Iterator, Mapping
from html import escape
from types import MappingProxyType

from enginegate.candidate import Candidate
from enginegate.measurement import Measurement
from enginegate.measuring.p99 import QUANTILES
from enginegate.report.serving import ServingReport, percentile_text, serving_sentences
from enginegate.report.serving_charts import (
    STAGES,
    colour,
    delay_chart,
    latency_chart,
    mark,
    pareto_chart,
    stage_chart,
)

_NO_ACCURACY: Mapping[Candidate, str] = MappingProxyType({})
_COLUMNS = (
    "candidate",
    "configuration",
    "load",
    "valid",
    "done, req/s",
    "failed",
    "requests",
    "p50, ms",
    "p90, ms",
    "p95, ms",
    "p99, ms",
    "p99.9, ms",
    "batch",
    "queue, ms",
    "compute, ms",
    "sent late, ms",
)
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}
svg{width:100%;height:auto;background:#fff}
.grid{stroke:#e4e4e4}.limit{stroke:#666;stroke-dasharray:6 4}.whisker{stroke-width:1.2}
.line{stroke-width:2.2}.dot.other{opacity:.45}.tick,.lane{font-size:11px;fill:#444}
.label{font-size:12px;fill:#222}.dot{cursor:pointer}.dot.on,.dot:focus{stroke:#000;stroke-width:3}
.off{display:none}
#legend label{margin-right:1.2em;white-space:nowrap}
.swatch{display:inline-block;width:.9em;height:.9em;margin:0 .3em;vertical-align:-.1em}
#told{min-height:1.5em;font-family:ui-monospace,monospace;font-size:13px}
.scroll{overflow-x:auto;max-height:30em;overflow-y:auto}
table{border-collapse:collapse;font-size:12.5px;white-space:nowrap}
th{position:sticky;top:0;background:#f2f2f2}
th,td{padding:.2em .6em;text-align:right;border-bottom:1px solid #eee}
th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}
tr.void{color:#888}tr.on{background:#fff3bf}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}svg{background:#eee}
th{background:#333}tr.on{background:#554a10}th,td{border-color:#333}}
"""
_SCRIPT = """
const all=(q)=>Array.from(document.querySelectorAll(q)),told=document.getElementById('told');
all('#legend input').forEach((box)=>box.addEventListener('change',()=>
  all('.'+box.value).forEach((e)=>e.classList.toggle('off',!box.checked))));
function point(name,scroll){
  all('.on').forEach((e)=>e.classList.remove('on'));
  all('[data-m="'+name+'"]').forEach((e)=>{
    e.classList.add('on');
    const title=e.querySelector('title');if(title)told.textContent=title.textContent;
    if(e.tagName==='TR'&&scroll)e.scrollIntoView({block:'nearest'});
  });
}
all('[data-m]').forEach((e)=>{
  e.addEventListener('mouseenter',()=>point(e.dataset.m,e.tagName!=='TR'));
  e.addEventListener('focus',()=>point(e.dataset.m,e.tagName!=='TR'));
});
"""


def serving_page(report: ServingReport, accuracy: Mapping[Candidate, str] = _NO_ACCURACY) -> str:
    """The page. ``accuracy``: each candidate's change against FP32 in words, where it is known."""
    winner = escape(str(report.winner or "none"))
    title = f"Serving {report.model}: {report.model_uri}"
    body = "".join(
        (
            f"<h1>{escape(title)}</h1>",
            f"<p><b>Winner: {winner}</b>. {escape(report.reason)}</p>",
            *_legend(report),
            '<p id="told">Point at a measurement, or walk through them with the Tab key.</p>',
            _section("p99 over throughput", latency_chart(report), _HOW_LATENCY),
            _section("p99 over queue delay and load", delay_chart(report), _HOW_DELAY),
            _section("Where the time goes", stage_chart(report), _stage_words()),
            _section("Cost, p99 and accuracy", pareto_chart(report, accuracy), _HOW_PARETO),
            *_words(report),
            *_table(report),
        )
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


_HOW_LATENCY = (
    "Lines join the chosen configuration's valid measurements; faint points are other "
    "configurations, grey ones must not be used. Whiskers: 95 % interval of p99."
)
_HOW_DELAY = "Green: within the SLO. Orange: within, and nearer than a fifth. Red: above it."
_HOW_PARETO = "No other point of the same candidate is better in both. Labelled: confirmed."


def _section(title: str, picture: str, words: str) -> str:
    return f"<h2>{escape(title)}</h2><p>{words}</p>{picture}"


def _stage_words() -> str:
    parts = (f"{_swatch(shade)}{escape(name)}" for name, shade in STAGES.items())
    return "Mean milliseconds of a request, by the server's counters: " + " ".join(parts)


def _swatch(shade: str) -> str:
    return f'<span class="swatch" style="background:{shade}"></span>'


def _legend(report: ServingReport) -> Iterator[str]:
    yield '<p id="legend">'
    for number, benchmark in enumerate(report.candidates):
        yield (
            f'<label><input type="checkbox" checked value="s{number}">{_swatch(colour(number))}'
            f"{escape(benchmark.candidate.name)} ({benchmark.outcome.word})</label>"
        )
    yield "</p>"


def _words(report: ServingReport) -> Iterator[str]:
    for number, benchmark in enumerate(report.candidates):
        lines = (f"<li>{escape(s)}</li>" for s in serving_sentences(benchmark, report.slo))
        yield f'<div class="s{number}"><h2>{escape(benchmark.candidate.name)}</h2>'
        yield f"<ul>{''.join(lines)}</ul></div>"


def _table(report: ServingReport) -> Iterator[str]:
    yield '<h2>Every measurement</h2><div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{escape(column)}</th>" for column in _COLUMNS)
    yield "</tr></thead><tbody>"
    for number, benchmark in enumerate(report.candidates):
        for index, m in enumerate(benchmark.measurements):
            void = " void" if m.invalid else ""
            yield f'<tr class="s{number}{void}" data-m="{mark(number, index)}">'
            cells = (benchmark.candidate.name, *_cells(m))
            yield "".join(f"<td>{escape(cell)}</td>" for cell in cells)
            yield "</tr>"
    yield "</tbody></table></div>"


def _cells(m: Measurement) -> tuple[str, ...]:
    stages = m.stages
    return (
        str(m.config),
        str(m.load),
        f"no: {m.invalid[0]}" if m.invalid else "yes",
        f"{m.throughput_per_s:,.1f}",
        f"{m.failed:,} of {m.completed + m.failed:,}",
        _counted(m),
        *(percentile_text(m.percentile(q)) for q in QUANTILES),
        f"{stages.mean_batch_size:.2f}" if stages else "n/a",
        f"{stages.queue_ms:.3f}" if stages else "n/a",
        f"{stages.compute_infer_ms:.3f}" if stages else "n/a",
        f"{m.late_p99_ms:.2f}",
    )


def _counted(m: Measurement) -> str:
    """From how many requests the percentiles are: failures included, the warm-up left out."""
    return next((f"{p.samples:,}" for p in m.percentiles), "n/a")
