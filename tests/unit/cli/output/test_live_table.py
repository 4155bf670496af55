"""The table while a qualification runs: at widths, with many rows, and where nothing redraws."""

import io
import logging

import pytest
from rich.console import Console

from enginegate.cli.output import live_table as module
from enginegate.cli.output.live_table import LiveTable, live_table, redraws
from enginegate.cli.terminal import err
from enginegate.errors import ServerError
from enginegate.report.progress import StageProgress, tell

LONGEST = "torch_inductor-bf16"
NAMES = ("onnxruntime-fp32", "onnxruntime-int8", LONGEST)
_log = logging.getLogger("enginegate.tests")


@pytest.fixture
def table():
    shown = LiveTable("digits: models:/digits/1", NAMES)
    for progress in (
        StageProgress("", "model to ONNX", "done"),
        StageProgress(NAMES[0], "build", "done", "0.1 s"),
        StageProgress(NAMES[0], "judge", "passed", "passed"),
        StageProgress(NAMES[0], "benchmark", "running", "p99 2.31 ms", 0.5),
        StageProgress(NAMES[1], "build", "done", "stored"),
        StageProgress(NAMES[1], "judge", "inconclusive", "inconclusive"),
        StageProgress(NAMES[1], "benchmark", "skipped", "cannot win"),
    ):
        shown(progress)
    return shown


def drawn(table, width, height=40, **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=options.pop("encoding", "utf-8"))
    console = Console(file=file, width=width, height=height, **options)
    console.print(table)
    file.flush()
    return file.buffer.getvalue().decode(file.encoding)


@pytest.mark.parametrize("width", [60, 80, 109, 160])
def test_names_and_progress_are_whole(table, width):
    """At the widths of real terminals."""
    text = drawn(table, width)

    assert max(map(len, text.splitlines())) <= width
    for words in (*NAMES, "50% p99 2.31 ms", "inconclusive"):
        assert words in text
    assert "…" not in text


def test_narrow_terminal_shows_where_each_candidate_is(table):
    """One column: the stage it has come to; what was skipped says less than what was found."""
    text = drawn(table, 60)

    assert "benchmark █████░░░░░ 50%" in text
    assert "judge inconclusive" in text
    assert "cannot win" not in text
    assert "waits" in text


def test_more_rows_than_lines_keeps_those_that_run(table):
    """The others are counted."""
    table.candidates = (*NAMES, *(f"tensorrt-fp16+keep{n}" for n in range(60)))

    text = drawn(table, 100, height=20)

    assert len(text.splitlines()) <= 20
    assert NAMES[0] in text
    assert "50 more rows" in text


def test_terminal_without_unicode_gets_ascii(table):
    """A bar is a bar."""
    text = drawn(table, 80, encoding="ascii")

    assert "#####..... 50%" in text


def test_where_nothing_redraws_progress_is_lines(monkeypatch):
    """A pipe, a dumb terminal, the log of a CI job."""
    for unset in ("CI", "TTY_INTERACTIVE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(unset, raising=False)

    def terminal(**environment):
        return Console(file=io.StringIO(), force_terminal=True, _environ=environment)

    assert redraws(terminal(TERM="xterm-256color"))
    assert redraws(terminal(TERM="xterm-256color", NO_COLOR="1"))
    assert not redraws(terminal(TERM="dumb"))
    assert not redraws(Console(file=io.StringIO()))
    monkeypatch.setenv("CI", "true")
    assert not redraws(terminal(TERM="xterm-256color"))


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(module._LOG, "level", logging.INFO)
    return Console(
        file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm-256color"}
    )


def test_lines_go_to_the_file_and_the_cursor_comes_back(terminal, table, tmp_path):
    """On success the table makes room for the result."""
    log = tmp_path / "logs" / "progress.log"

    with live_table(table, terminal, log):
        tell(StageProgress(LONGEST, "build", "done", "3.0 s"))
        _log.info("one of a hundred lines")

    said = terminal.file.getvalue()
    assert "one of a hundred lines" in log.read_text()
    assert "one of a hundred lines" not in said
    assert str(log) in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")


@pytest.mark.parametrize("error", [ServerError("it died"), ValueError("oops")])
def test_failure_leaves_the_table_and_the_last_lines(terminal, table, tmp_path, error):
    """How far it came, what was said last, where the rest is; and the cursor."""

    def fail():
        with live_table(table, terminal, tmp_path / "progress.log"):
            _log.info("the last line")
            raise error

    with pytest.raises(type(error)):
        fail()

    shown = terminal.file.getvalue().rpartition("\x1b[?25h")[2]
    assert NAMES[0] in shown
    assert "the last line" in shown
    assert "progress.log" in shown


def test_ctrl_c_leaves_the_table_and_the_cursor(terminal, table, tmp_path):
    """Whoever stopped it needs no evidence of why."""

    def stop():
        with live_table(table, terminal, tmp_path / "progress.log"):
            _log.info("the last line")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()

    shown = terminal.file.getvalue().rpartition("\x1b[?25h")[2]
    assert NAMES[0] in shown
    assert "the last line" not in shown
    assert "Ctrl-C stops" not in shown


def test_lines_come_back_to_the_terminal_afterwards(terminal, table, tmp_path):
    """The handler that writes there has its level again, and nothing stays in the file's."""
    handler = logging.StreamHandler(io.StringIO())
    module._LOG.addHandler(handler)
    try:
        with live_table(table, terminal, tmp_path / "progress.log"):
            _log.info("while it is drawn")
            _log.warning("a warning")
        _log.info("afterwards")
    finally:
        module._LOG.removeHandler(handler)

    assert handler.stream.getvalue().splitlines() == ["a warning", "afterwards"]


def test_file_that_cannot_be_written_is_no_failure(terminal, table, tmp_path):
    """A qualification does not end because its log cannot be kept."""
    (tmp_path / "logs").write_text("a file")

    with live_table(table, terminal, tmp_path / "logs" / "progress.log"):
        _log.info("a line")

    assert "every line" not in terminal.file.getvalue()


def test_results_are_not_where_progress_is():
    """The table is on the error output, so that the standard output can be redirected."""
    assert err.file is not None
    assert err.file.fileno() != 1
