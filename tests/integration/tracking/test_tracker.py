"""Registered versions and aliases, on a real MLflow database."""

import pytest

from enginegate.errors import ModelError, TrackingError
from enginegate.tracking import Tracker


def test_resolve(tracker, registered):
    """An alias resolves to the version it stands for now; a version to itself."""
    first, second = registered("resolved"), registered("resolved")
    tracker.move_alias("resolved", "champion", second)

    assert (first, second) == (1, 2)
    assert tracker.resolve("models:/resolved@champion") == "models:/resolved/2"
    assert tracker.resolve("models:/resolved/1") == "models:/resolved/1"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("models:/listed/7", "has versions: 1; aliases: live -> 1"),
        ("models:/listed@champion", "has versions: 1; aliases: live -> 1"),
        ("models:/unknown/1", "no model 'unknown' in the registry"),
        ("models:/listed", "Give models:/NAME/VERSION or models:/NAME@ALIAS"),
        ("runs:/abc/model", "Give models:/NAME/VERSION or models:/NAME@ALIAS"),
    ],
)
def test_resolve_lists_what_exists(tracker, registered, uri, expected):
    """A name that is not there gets the names that are."""
    if tracker.alias("listed", "live") is None:
        tracker.move_alias("listed", "live", registered("listed"))

    with pytest.raises(ModelError, match=expected):
        tracker.resolve(uri)


def test_two_first_versions_of_one_name_are_both_registered(registered, monkeypatch):
    """Both found no model of that name; whoever makes it later takes the one that is there."""
    first = registered("raced")
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "_model", lambda *_: None)
        second = registered("raced")

    assert (first, second) == (1, 2)


def test_unknown_model_lists_the_models(tracker, registered):
    """Whoever mistypes a name sees the right one."""
    registered("a model that is seen")

    with pytest.raises(ModelError, match=r"It holds: .*a model that is seen"):
        tracker.resolve("models:/sen/1")


def test_alias_moves(tracker, registered):
    """An alias stands for one version at a time; a missing one is None, not an error."""
    first, second = registered("moved"), registered("moved")
    before = tracker.alias("moved", "champion")
    tracker.move_alias("moved", "champion", second)
    tracker.move_alias("moved", "champion", first)

    assert before is None
    assert tracker.alias("moved", "champion") == first
    assert tracker.alias("no-such-model", "champion") is None
    assert (tracker.aliased("moved"), tracker.aliased("no-such-model")) == ({first}, frozenset())


@pytest.mark.parametrize(("alias", "version"), [("champion", 9), ("latest", 1), ("a b", 1)])
def test_refused_alias(tracker, registered, alias, version):
    """An alias of a version that is not there, or one MLflow keeps for itself, is refused."""
    if tracker.version_tags("refused", 1) is None:
        registered("refused")

    with pytest.raises(TrackingError, match=f"could not let refused@{alias} stand for"):
        tracker.move_alias("refused", alias, version)


def test_version_tags(tracker, registered):
    """Facts of a release are written on the version it came from."""
    version = registered("tagged")
    tracker.tag_version("tagged", version, {"release": "3"})

    assert tracker.version_tags("tagged", version) == {"recipe": "a", "release": "3"}
    assert tracker.version_tags("tagged", 2) is None
    with pytest.raises(TrackingError, match="could not tag version 2 of tagged"):
        tracker.tag_version("tagged", 2, {"release": "3"})


def test_registering_leaves_the_default_database_alone(registered, tmp_path, monkeypatch):
    """MLflow's own default, a database in the current folder, is never made."""
    monkeypatch.chdir(tmp_path)
    registered("elsewhere")

    assert list(tmp_path.iterdir()) == []


def test_damaged_database(tmp_path):
    """A file that is no database is named, and left as it is."""
    file = tmp_path / "mlflow.db"
    file.write_text("not a database " * 100)

    with pytest.raises(TrackingError, match=r"mlflow\.db.*not a database\n.*Move a damaged file"):
        Tracker(f"sqlite:///{file}", tmp_path).alias("digits", "champion")
    assert file.read_text().startswith("not a database")


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        ("http://127.0.0.1:9", r"curl http://127\.0\.0\.1:9/health"),
        ("bogus://somewhere", "Give a tracking URI that MLflow knows"),
    ],
)
def test_unreachable(uri, advice, tmp_path, monkeypatch):
    """A server that does not answer, and a scheme nobody knows, say what to do."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(TrackingError, match=advice):
        Tracker(uri, tmp_path).alias("digits", "champion")
