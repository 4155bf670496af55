"""What overlaps in a qualification, and what waits for what."""

from types import SimpleNamespace

import pytest

from flows import qualify


class BrokenBuildError(Exception):
    """Ends the flow where a test has seen enough."""


def test_engines_are_judged_while_others_are_built(monkeypatch):
    """FP32 is observed, and the first engine judged, before anybody waits for the last build."""
    done = []

    class Future:
        def __init__(self, engine):
            self.engine = engine

        def result(self):
            if self.engine == "last":
                raise BrokenBuildError
            return self.engine

    def step(name, answer=None):
        def run(*_arguments):
            done.append(name)
            return answer

        return run

    futures = [Future("first"), Future("second"), Future("last")]
    monkeypatch.setattr(qualify, "build", SimpleNamespace(map=step("build", futures)))
    shadow = SimpleNamespace(data=None, notes=())
    monkeypatch.setattr(qualify, "record_shadow", step("record", shadow))
    monkeypatch.setattr(qualify, "outputs_to_compare", lambda *_: ())
    monkeypatch.setattr(qualify, "observe", step("observe"))
    monkeypatch.setattr(qualify, "validate", lambda engine, *_: done.append(f"judge {engine}"))
    tables = SimpleNamespace(candidates=SimpleNamespace(all=list))
    names = ("gates", "model", "traffic_tables", "task", "outputs", "metrics", "slices")
    policy = SimpleNamespace(
        engine_tables=tables,
        data=SimpleNamespace(evaluation=None),
        evaluation=None,
        **dict.fromkeys(names),
    )

    with pytest.raises(BrokenBuildError):
        qualify.collect_evidence(policy, None, None)

    assert done == ["build", "record", "observe", "judge first", "judge second"]
