"""An ensemble is several Triton models published, rolled back and recovered as one."""

import threading
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from enginegate.atomic_io import write_file
from enginegate.errors import PublishError, RepositoryError
from enginegate.repository import Current, Layout, verify
from enginegate.repository.ensemble.composition import as_ensemble, composes
from enginegate.repository.ensemble.record_golden import record_golden
from enginegate.repository.store.release_files import ReleaseFiles
from enginegate.repository.store.removal import forget_old
from enginegate.repository.store.staging import check_room, place
from enginegate.serving import BackendSettings

pytestmark = pytest.mark.triton
PARTS = ("digits.double", "digits.engine", "digits.tenfold")
OTHER = "digits.engine-tf32"


@pytest.fixture(autouse=True)
def _parts_gone(server):
    """Leave no composing model loaded for the next test."""
    yield
    with server.client() as client:
        for name in ("digits", *PARTS, OTHER):
            client.unload(name)


def problems(repository):
    return [check.problem for check in verify(repository) if check.problem]


def ready(repository, name):
    return {row.version for row in repository.client.index() if row.name == name and row.ready}


def pinned(repository):
    config = repository.client.config("digits").message
    return {step.model_version for step in config.ensemble_scheduling.step}


def answer(client):
    """Which version answers, and what its engine adds."""
    reply = client.infer("digits", {"raw": np.full((2, 2), 3, np.float32)})
    return int(reply.model_version), float(reply.outputs["score"][1, 1]) / 10 - 6


class Traffic:
    """Requests for as long as the block runs; each answer must be its version's."""

    def __init__(self, server):
        self.server, self.wrong, self.asked = server, [], 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _run(self):
        with self.server.client() as client:
            while not self._end.is_set():
                self.asked += 1
                try:
                    version, added = answer(client)
                    right = added == version
                except Exception as error:  # noqa: BLE001 - every failure counts
                    version, right = error, False
                if not right:
                    self.wrong.append(version)


def test_ensemble_switches_and_rolls_back_without_wrong_answers(repository, ensemble, server):
    """Parts first, then the flip: no request fails, none mixes the versions of two releases."""
    repository.publish(ensemble(1.0), expected=None)
    with Traffic(server) as traffic:
        repository.publish(ensemble(2.0), expected=1)
        assert (answer(repository.client), pinned(repository)) == ((2, 2.0), {2})
        assert [ready(repository, name) for name in PARTS] == [{1, 2}] * 3
        repository.rollback("digits")
        assert (answer(repository.client), pinned(repository)) == ((1, 1.0), {1})
        assert [ready(repository, name) for name in PARTS] == [{1}] * 3
    assert traffic.asked > 10
    assert traffic.wrong == []
    assert problems(repository) == []


def test_composing_model_of_another_kind_has_its_own_config(repository, ensemble, server, steps):
    """Both engines serve while the ensemble goes over, each with a configuration that fits it."""
    tf32 = BackendSettings(cuda_provider={"use_tf32": "1"})
    repository.publish(ensemble(1.0), expected=None)
    with Traffic(server) as traffic:
        made = repository.publish(ensemble(2.0, engine={"settings": tf32}), expected=1)
        assert answer(repository.client) == (2, 2.0)
        assert [part.name for part in made.engine.parts][1] == "digits.engine-tf32"
        assert (ready(repository, "digits.engine"), ready(repository, OTHER)) == ({1}, {2})
        assert composes(Layout(repository.root, "digits"), made, steps)
        repository.rollback("digits")
        assert answer(repository.client) == (1, 1.0)
        assert (ready(repository, "digits.engine"), ready(repository, OTHER)) == ({1}, set())
    assert traffic.wrong == []
    assert problems(repository) == []


def test_ensemble_with_different_answers_is_undone(repository, ensemble, steps):
    """The engine must give its validated answers; every model is rolled back, verified."""
    short = steps.model_copy(update={"before": ()})
    repository.publish(ensemble(1.0, rules=short), expected=None)
    wrong, other = ensemble(2.0, rules=short), ensemble(9.0, rules=short)
    engine = replace(wrong.parts[0], golden=other.parts[0].golden)

    with pytest.raises(PublishError, match=r"(?s)differs from the validated.*Release 1 is live"):
        repository.publish(replace(wrong, parts=(engine, wrong.parts[1])), expected=1)

    after = ("digits.engine", "digits.tenfold")
    assert [ready(repository, name) for name in after] == [{1}, {1}]
    assert [Layout(repository.root, name).stored_versions() for name in after] == [(1,), (1,)]
    assert problems(repository) == []
    part = repository.root / "digits.tenfold"
    code = (part / "1" / "model.py").read_text()
    (part / "1" / "model.py").chmod(0o644)
    (part / "1" / "model.py").write_text(code + "#")
    (part / "config.pbtxt").write_text("")
    (part / "7").mkdir()
    said = "".join(problems(repository))
    assert "digits.tenfold/1/model.py is not the file" in said
    assert "digits.tenfold/config.pbtxt is not what release 1" in said
    assert "digits.tenfold/7 belongs to no release" in said


def _place(root, package, version, current):
    """Put a release on disk as its promotion would, without a server."""
    layout = Layout(root, "digits")
    place(layout, package, version, layout.current())
    write_file(layout.current_file, current.pretty_json())
    return layout


@pytest.mark.parametrize("pinned_too", [frozenset(), frozenset({1})], ids=["none", "pinned"])
def test_old_versions_of_parts_are_forgotten_with_their_release(tmp_path, ensemble, pinned_too):
    """Neither the live release nor the standby nor a pinned one loses its bytes."""
    root = tmp_path / "repository"
    root.mkdir()
    for number in (1, 2, 3, 4):
        current = Current(
            version=number,
            standby=number - 1 or None,
            known=tuple(n for n in (number - 1, number) if n),
            changed_at=datetime.now(tz=UTC),
        )
        layout = _place(root, ensemble(float(number)), number, current)

    forget_old(layout, 1, pinned_too)

    left = (*sorted(pinned_too), 3, 4)
    stored = [Layout(root, name).stored_versions() for name in ("digits", *PARTS)]
    assert stored == [left] * 4
    assert [release.version for release in layout.releases()] == [1, 2, 3, 4]
    ReleaseFiles(layout, layout.release(4)).check()


def test_composing_model_keeps_its_interface(tmp_path, ensemble, steps):
    """While traffic goes over, both versions of a composing model share one configuration."""
    root = tmp_path / "repository"
    root.mkdir()
    now = datetime.now(tz=UTC)
    layout = _place(root, ensemble(1.0), 1, Current(version=1, known=(1,), changed_at=now))
    path = steps.before[0].folder / "config.pbtxt"
    path.write_text(path.read_text().replace('"IN"', '"GIVEN"'))
    changed = steps.before[0].model_copy(update={"inputs": {"GIVEN": "raw"}})
    rules = steps.model_copy(update={"before": (changed,)})

    with pytest.raises(RepositoryError, match=r'digits\.double.*"IN".*became.*"GIVEN"'):
        place(layout, ensemble(2.0, rules=rules), 2, layout.current())


def test_composing_model_never_replaces_a_foreign_model(tmp_path, ensemble):
    """A folder of the composing model's name that this model does not own is left alone."""
    root = tmp_path / "repository"
    (root / "digits.double" / "1").mkdir(parents=True)

    with pytest.raises(RepositoryError, match=r"digits\.double is another model's"):
        check_room(Layout(root, "digits"), ensemble(1.0).part_names, 1)


def test_rehearsal_records_the_answers(server, steps, package, root):
    """The composing models on a server of our own answer as they will when they are published."""
    raw = np.arange(6, dtype=np.float32).reshape(3, 2)
    short = steps.model_copy(update={"before": ()})

    made = as_ensemble(
        package(4.0),
        short,
        lambda composed: record_golden(server, composed, {"x": raw, "other": raw}),
    )

    assert list(made.golden.inputs) == ["x"]
    assert np.array_equal(made.golden.outputs["score"], (raw + 4) * 10)
    assert list(root.iterdir()) == []


def test_ensemble_digest_covers_its_steps(tmp_path, ensemble, steps):
    """Another wiring, configuration or byte of a step is another release; so is no step at all."""
    root = tmp_path / "repository"
    root.mkdir()
    now = datetime.now(tz=UTC)
    layout = _place(root, ensemble(1.0), 1, Current(version=1, known=(1,), changed_at=now))
    release = layout.release(1)
    renamed = steps.after[0].model_copy(update={"outputs": {"OUT": "other"}})

    assert composes(layout, release, steps)
    assert not composes(layout, release, None)
    assert not composes(layout, release, steps.model_copy(update={"after": (renamed,)}))
    for name, old, new in (("config.pbtxt", "16", "32"), ("model.py", "xs", "all_xs")):
        path = steps.before[0].folder / name
        was = path.read_text()
        path.write_text(was.replace(old, new))
        assert not composes(layout, release, steps)
        path.write_text(was)
    assert composes(layout, release, steps)
