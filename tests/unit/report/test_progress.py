"""Progress reaches whoever listens in this process, whichever thread it comes from."""

import threading

import pytest

from enginegate.report.progress import StageProgress, listening, tell, told_as
from tests.fakes.evidence import INT8


@told_as("build", lambda made: ("failed" if made == "no" else "done", made))
def build(_candidate, answer, error=None):
    if error:
        raise error
    return answer


def heard(work):
    found = []
    with listening(found.append):
        work()
    return [(each.candidate, each.stage, each.state, each.words) for each in found]


def test_begin_and_end_are_told():
    """The candidate is the first argument; the end is what the function returned."""
    assert heard(lambda: build(INT8, "1.2 s")) == [
        ("onnxruntime-int8", "build", "running", ""),
        ("onnxruntime-int8", "build", "done", "1.2 s"),
    ]
    assert heard(lambda: build(INT8, "no"))[-1][2] == "failed"


def test_exception_is_told_and_passed_on():
    """Otherwise a row would say for ever that it runs."""

    def work():
        with pytest.raises(ValueError, match="oops"):
            build(INT8, "", error=ValueError("oops"))

    assert heard(work)[-1][2] == "errored"


def test_ctrl_c_is_no_error():
    """It stopped, and will go on where it was."""

    def work():
        with pytest.raises(KeyboardInterrupt):
            build(INT8, "", error=KeyboardInterrupt())

    assert heard(work)[-1][2] == "stopped"


def test_other_threads_are_heard():
    """Engines are built in a thread each."""

    def work():
        thread = threading.Thread(target=build, args=(INT8, "1 s"))
        thread.start()
        thread.join()

    assert len(heard(work)) == 2


def test_nobody_listens_after_the_block():
    """Nor is anything told to a table that is gone."""
    found = []
    with listening(found.append):
        pass
    tell(StageProgress("", "scorecard", "done"))

    assert found == []
    assert build(INT8, "2 s") == "2 s"
