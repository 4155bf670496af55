"""One table while a qualification runs: each candidate and its stages, instead of a hundred lines.

Only on a terminal that can redraw. Elsewhere (a pipe, ``TERM=dumb``, ``CI``) progress is lines, as
before. Below the table nothing is hidden for good: every line is in a log file, warnings are
printed above the table at once, and a failure shows the last lines.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from enginegate.candidate import Candidate
from enginegate.cli.terminal import TerminalHandler, err, interruptible
from enginegate.errors import EnginegateError
from enginegate.policy import Policy
from enginegate.report.progress import StageProgress, listening
from enginegate.report.tables import print_hanging
from enginegate.workspace import Workspace

STAGES = ("build", "judge", "alone", "benchmark")
# Below this, four stages do not fit beside a candidate's name: only where each one is now.
_ALL_STAGES_FROM = 80
_PER_SECOND = 4
_LINES_SHOWN, _FEW_LINES = 12, 3
# For heading, steps, footer, and a line that the cursor stands in.
_OTHER_LINES = 7
_BAR = 10
# Of the log file: about a thousand qualifications; then a new one is begun.
_MAX_BYTES = 10_000_000
_STYLES = {
    "passed": "green",
    "inconclusive": "yellow",
    "failed": "red",
    "errored": "magenta",
    "skipped": "dim",
}
_LOG = logging.getLogger("enginegate")


@dataclass(slots=True)
class LiveTable:
    """What the table shows; a listener of progress, called from any thread.

    Attributes:
        title: of what is qualified.
        candidates: in the policy's order; one that comes of a repair is added.
        stages: columns.
        ended: whether nothing runs any more, so that there is nothing to stop.
    """

    title: str
    candidates: Sequence[str]
    stages: Sequence[str] = STAGES
    ended: bool = False
    began: float = field(default_factory=time.monotonic)
    _cells: dict[tuple[str, str], StageProgress] = field(default_factory=dict)
    _since: dict[tuple[str, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, progress: StageProgress) -> None:
        """Take in what a step tells."""
        key = (progress.candidate, progress.stage)
        with self._lock:
            before = self._cells.get(key)
            if before is None or before.state != progress.state:
                self._since[key] = time.monotonic()
            self._cells[key] = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it at the width and height that the terminal has now."""
        with self._lock:
            cells = dict(self._cells)
        plain = not (console.encoding or "").lower().startswith("utf")
        names = list(dict.fromkeys([*self.candidates, *(name for name, _ in cells if name)]))
        shown = self._most_urgent(names, cells, room=console.height - _OTHER_LINES)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("candidate", no_wrap=True)
        wide = options.max_width >= _ALL_STAGES_FROM
        for stage in self.stages if wide else ("now",):
            table.add_column(stage, no_wrap=True)
        for name in shown:
            row = [self._cell(cells.get((name, stage)), plain=plain) for stage in self.stages]
            now = self._now(name, cells, plain=plain)
            table.add_row(name, *(row if wide else [now]))
        hidden = len(names) - len(shown)
        yield Group(
            Text(self.title, style="bold", no_wrap=True, overflow="ellipsis"),
            self._steps(cells),
            table,
            Text(self._footer(names, cells, hidden), style="dim"),
        )

    def _most_urgent(
        self, names: list[str], cells: dict[tuple[str, str], StageProgress], *, room: int
    ) -> list[str]:
        """As many as fit, in their order: those that run, then those that have most to do."""
        if len(names) <= room:
            return names

        def rank(name: str) -> tuple[bool, int]:
            of_it = [cells[name, stage] for stage in self.stages if (name, stage) in cells]
            return all(c.state != "running" for c in of_it), len(of_it)

        return sorted(sorted(names, key=rank)[: max(room, 1)], key=names.index)

    def _steps(self, cells: dict[tuple[str, str], StageProgress]) -> Text:
        """What is for all candidates: ended steps with their time, then the one that runs."""
        said = Text()
        for (name, stage), cell in cells.items():
            if name or cell.state == "skipped":
                continue
            running = cell.state == "running"
            since = f" {time.monotonic() - self._since[name, stage]:.0f} s" if running else ""
            style = "bold" if running else _STYLES.get(cell.state, "dim")
            said.append(("; " if said else "") + stage + (since or " done"), style=style)
        return said

    def _footer(
        self, names: list[str], cells: dict[tuple[str, str], StageProgress], hidden: int
    ) -> str:
        ended = sum(
            1 for name in names if (found := cells.get((name, self.stages[-1]))) and _counts(found)
        )
        more = f"; {hidden} more rows" if hidden else ""
        took = f"{time.monotonic() - self.began:.0f} s; {ended} of {len(names)} measured{more}."
        return took if self.ended else f"{took} Ctrl-C stops; what is finished is kept."

    def _now(self, name: str, cells: dict[tuple[str, str], StageProgress], *, plain: bool) -> Text:
        """The stage a candidate has come to, with what it shows."""
        found = [cells[name, stage] for stage in self.stages if (name, stage) in cells]
        told = [cell for cell in found if cell.state != "skipped"] or found
        if not told:
            return Text("waits", style="dim")
        return Text(f"{told[-1].stage} ").append_text(self._cell(told[-1], plain=plain))

    def _cell(self, cell: StageProgress | None, *, plain: bool) -> Text:
        if cell is None:
            return Text("-" if plain else "·", style="dim")
        if cell.state != "running":
            return Text(cell.words or cell.state, style=_STYLES.get(cell.state, ""))
        if cell.share is not None:
            return Text(f"{_bar(cell.share, plain=plain)} {cell.words}".rstrip(), style="bold")
        seconds = time.monotonic() - self._since[cell.candidate, cell.stage]
        return Text(f"{seconds:.0f} s", style="bold")


def _bar(share: float, *, plain: bool) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR)
    done, left = ("#", ".") if plain else ("█", "░")
    return f"{done * full}{left * (_BAR - full)} {share:.0%}"


def _counts(cell: StageProgress) -> bool:
    return cell.state not in {"running", "skipped", "stopped"}


def redraws(console: Console) -> bool:
    """Whether a table can be drawn over and over there: a terminal, not dumb, no CI job's log."""
    return console.is_interactive and not os.environ.get("CI")


@contextmanager
def qualification_shown(
    rules: Policy,
    candidates: Iterable[Candidate] | None = None,
    *,
    stages: Sequence[str] = STAGES,
) -> Iterator[None]:
    """Show the progress of a policy's flow on the error output, and let Ctrl-C end it.

    Args:
        rules: the policy.
        candidates: that it is about; None: all of the policy.
        stages: of each.
    """
    names = [each.name for each in candidates or rules.candidates.all()]
    table = LiveTable(f"{rules.name}: {rules.model.uri}", names, stages)
    with interruptible(err), live_table(table, err, Workspace.of(rules).logs / "progress.log"):
        yield


@contextmanager
def live_table(table: LiveTable, console: Console, log_file: Path) -> Iterator[None]:
    """Show a qualification's progress while the block runs: the table, or plain lines.

    Args:
        table: what is shown.
        console: the error output; the standard output is for results.
        log_file: gets every line that the table replaces; lines of earlier runs stay in it.
    """
    if not redraws(console):
        yield
        return
    lines = _Lines(log_file)
    shown = Live(
        table,
        console=console,
        refresh_per_second=_PER_SECOND,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    try:
        with listening(table), _only_warnings(lines), shown:
            yield
    except BaseException as error:
        _show_end(table, lines, console, error)
        raise
    took = time.monotonic() - table.began
    where = f"; every line is in {log_file}" if lines.file is not None else ""
    console.print(Text(f"Took {took:.0f} s{where}", style="dim"), soft_wrap=True)


def _show_end(table: LiveTable, lines: "_Lines", console: Console, error: BaseException) -> None:
    """Leave on the screen how far it came; after a fault also what was said last."""
    table.ended = True
    console.print(table)
    wanted = 0
    if isinstance(error, Exception):
        # A message of this program's own says what happened; for others the lines are evidence.
        wanted = _FEW_LINES if isinstance(error, EnginegateError) else _LINES_SHOWN
    for line in list(lines.last)[len(lines.last) - min(wanted, len(lines.last)) :]:
        print_hanging(console, Text(line, style="dim"), "  ")
    if lines.file is not None:
        console.print(Text(f"Every line is in {lines.path}", style="dim"), soft_wrap=True)


class _Lines(logging.Handler):
    """Every line into a file, and the last ones in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        self.last: deque[str] = deque(maxlen=_LINES_SHOWN)
        self.path = path
        self.file = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file() and path.stat().st_size > _MAX_BYTES:
                path.replace(path.with_suffix(".log.1"))
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            self.file = os.fdopen(handle, "a", encoding="utf-8", errors="replace")
        except OSError as error:
            _LOG.warning("progress is not kept: %s: %s", path, error.strerror)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line; a full disk is no failure of the command."""
        line = self.format(record)
        self.last.append(line)
        try:
            if self.file is not None:
                self.file.write(f"{line}\n")
                self.file.flush()
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802, ARG002 - logging's name
        """Pass over it: there is nowhere to say it while the table is drawn."""
        sys.exc_info()

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
        super().close()


@contextmanager
def _only_warnings(lines: _Lines) -> Iterator[None]:
    """Send every line to the file; of what goes to the terminal, only warnings."""
    before = {handler: handler.level for handler in _LOG.handlers if _is_ours(handler)}
    for handler in before:
        handler.setLevel(logging.WARNING)
    _LOG.addHandler(lines)
    try:
        yield
    finally:
        _LOG.removeHandler(lines)
        lines.close()
        for handler, level in before.items():
            handler.setLevel(level)


def _is_ours(handler: logging.Handler) -> bool:
    """Whether a handler writes to the terminal; Prefect has one that sends lines to its server."""
    return isinstance(handler, logging.StreamHandler | TerminalHandler)
