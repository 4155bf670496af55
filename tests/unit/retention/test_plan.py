"""What may be deleted is decided from what exists and what refers to it."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginegate.retention.plan import (
    PartFacts,
    Reason,
    ReleaseFacts,
    RepositoryFacts,
    RetentionFacts,
    ScorecardFacts,
    StoredEntry,
    find_references,
    plan_pruning,
)

NOW = datetime(2026, 11, 23, tzinfo=UTC)
OLD, SINCE = NOW - timedelta(days=90), NOW - timedelta(days=30)


def entry(kind, *names, used_at=OLD, **changes):
    """An old entry that has these names."""
    place = f"{kind}/{names[0] if names else 'unnamed'}"
    return StoredEntry(kind, place, 10, used_at, frozenset(names), **changes)


def release(version, *, has_bytes=True, **changes):
    """A release of scorecard ``cN`` with the engine ``eN``."""
    fields = {
        "names": frozenset({f"r{version}"}),
        "scorecards": frozenset({f"c{version}"}),
        "engines": frozenset({f"e{version}"}),
        "model_uri": f"models:/digits/{version}",
        "place": f"live/digits/{version}",
    }
    return ReleaseFacts(version=version, has_bytes=has_bytes, **(fields | changes))


def repository(*releases, live=None, needed=(), keep=2, model="digits"):
    return RepositoryFacts(model, live, frozenset(needed), keep, releases)


def card(digest, **changes):
    """An old scorecard of digits with engine ``e-DIGEST``; it replaces nothing."""
    fields = {
        "model": "digits",
        "model_uri": "models:/digits/9",
        "approvable": True,
        "replaces": None,
        "used_at": OLD,
        "engines": frozenset({f"e-{digest}"}),
        "names": frozenset({f"e-{digest}", f"onnx-{digest}", f"golden-{digest}"}),
    }
    fields |= changes
    names = fields.pop("names")
    return ScorecardFacts(digest=digest, read_names=lambda: names, **fields)


def facts(**changes):
    fields = {
        "repositories": (),
        "scorecards": (),
        "parts": (),
        "recorded": frozenset(),
        "aliased": {},
        "asked": frozenset(),
        "models": frozenset({"digits"}),
        "unused_since": SINCE,
    }
    return RetentionFacts(**(fields | changes))


def deleted(entries, **changes):
    """Names of what is deleted, without the kind."""
    plan = plan_pruning(entries, find_references(facts(**changes)), SINCE)
    return [each.place.partition("/")[2] for each in plan.delete]


class TestReleases:
    """Releases that serve, or may serve again, keep what they need."""

    releases = (release(1), release(2), release(3), release(4))

    def test_live_and_newest_keep_their_bytes(self):
        entries = [StoredEntry("release", r.place, 10, NOW) for r in self.releases]

        found = repository(*self.releases, live=2, keep=1)

        assert deleted(entries, repositories=(found,)) == ["digits/1", "digits/3"]

    def test_release_that_something_needs_keeps_its_bytes(self):
        """Standing by, the one before the live one, or of an operation that was cut short."""
        entries = [StoredEntry("release", r.place, 10, NOW) for r in self.releases]

        found = repository(*self.releases, live=4, needed={1, 3}, keep=1)

        assert deleted(entries, repositories=(found,)) == ["digits/2"]

    def test_release_of_an_aliased_version_keeps_its_bytes(self):
        entries = [StoredEntry("release", r.place, 10, NOW) for r in self.releases]

        found = repository(*self.releases, live=4, keep=1)

        aliased = {"digits": frozenset({2})}
        assert deleted(entries, repositories=(found,), aliased=aliased) == ["digits/1", "digits/3"]

    def test_engine_and_evidence_of_a_kept_release_stay_and_its_losers_go(self):
        """The FP32 model answers for the release while it is watched; a loser does nothing."""
        c4 = card(
            "c4",
            engines=frozenset({"e4", "loser"}),
            names=frozenset({"e4", "loser", "onnx", "latencies"}),
        )
        names = ("e4", "loser", "onnx", "latencies", "c4", "r4", "e1", "c1")
        entries = [entry("engine", name) for name in names]

        found = repository(*self.releases, live=4, keep=1)

        # Of release 1 the record stays, for its manifest names it.
        gone = deleted(entries, repositories=(found,), scorecards=(c4,))
        assert gone == ["e1", "loser"]

    def test_replica_that_lags_behind_keeps_what_it_serves(self):
        """Two repositories of a model, with different releases live."""
        first = repository(release(1), release(2), live=2, keep=1)
        second = repository(release(1, place="other/digits/1"), live=1, keep=1)

        entries = [entry("engine", "e1"), entry("engine", "e2")]

        assert deleted(entries, repositories=(first, second)) == []


class TestScorecards:
    """A scorecard that somebody may still publish keeps everything that it names."""

    def everything_of(self, digest):
        names = (digest, f"e-{digest}", f"onnx-{digest}", f"golden-{digest}")
        return [entry("engine", name) for name in names]

    def test_waiting_scorecard_keeps_all_it_names(self):
        """It is old, nobody answered, and what it would replace is still live."""
        live = repository(release(3), live=3)

        found = deleted(
            self.everything_of("card"),
            repositories=(live,),
            scorecards=(card("card", replaces=3),),
        )

        assert found == []

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param({"replaces": 2}, id="another release is live by now"),
            pytest.param({"approvable": False}, id="nothing on it can be published"),
        ],
    )
    def test_scorecard_that_nobody_can_publish_goes_when_it_is_old(self, changes):
        live = repository(release(3), live=3)

        found = card("card", **({"replaces": 3} | changes))
        gone = deleted(self.everything_of("card"), repositories=(live,), scorecards=(found,))

        assert sorted(gone) == ["card", "e-card", "golden-card", "onnx-card"]

    def test_answer_is_kept_and_what_was_rejected_goes(self):
        """Who said no, and to what, is a record; the engines are not."""
        live = repository(release(3), live=3)

        found = card("card", replaces=3, answer="reject")
        gone = deleted(self.everything_of("card"), repositories=(live,), scorecards=(found,))

        assert sorted(gone) == ["e-card", "golden-card", "onnx-card"]

    def test_of_old_waiting_scorecards_of_one_version_the_newest_counts(self):
        live = repository(release(3), live=3)
        old = card("old", replaces=3, used_at=OLD - timedelta(days=1))
        new = card("new", replaces=3)

        entries = [*self.everything_of("old"), *self.everything_of("new")]
        gone = deleted(entries, repositories=(live,), scorecards=(old, new))

        assert sorted(gone) == ["e-old", "golden-old", "old", "onnx-old"]

    def test_waiting_scorecard_is_kept_beside_a_newer_one_that_was_rejected(self):
        live = repository(release(3), live=3)
        rejected = card("new", replaces=3, answer="reject", used_at=OLD + timedelta(days=1))

        gone = deleted(
            self.everything_of("old"),
            repositories=(live,),
            scorecards=(card("old", replaces=3), rejected),
        )

        assert gone == []

    def test_approved_scorecard_is_kept_beside_a_newer_one(self):
        live = repository(release(3), live=3)
        old = card("old", replaces=3, answer="approve", used_at=OLD - timedelta(days=1))

        gone = deleted(
            self.everything_of("old"),
            repositories=(live,),
            scorecards=(old, card("new", replaces=3)),
        )

        assert gone == []

    @pytest.mark.parametrize(
        ("changes", "of_card"),
        [
            pytest.param({"asked": frozenset({"ca"})}, {}, id="a suspended promotion names it"),
            pytest.param(
                {"aliased": {"digits": frozenset({9})}}, {}, id="an alias names its version"
            ),
            pytest.param({"models": frozenset()}, {}, id="no policy is for its model"),
            pytest.param({}, {"model": ""}, id="it cannot be read"),
            pytest.param({}, {"used_at": NOW}, id="it was used lately"),
        ],
    )
    def test_scorecard_that_is_needed_keeps_all_it_names(self, changes, of_card):
        """Even where nobody could publish it any more."""
        found = card("card", **({"replaces": 1} | of_card))

        assert deleted(self.everything_of("card"), scorecards=(found,), **changes) == []

    def test_audit_log_keeps_the_scorecard_alone(self):
        gone = deleted(
            self.everything_of("card"),
            scorecards=(card("card", replaces=1),),
            recorded=frozenset({"card"}),
        )

        assert sorted(gone) == ["e-card", "golden-card", "onnx-card"]


class TestParts:
    """A part of a qualification knows in which folder an engine is."""

    def test_part_that_judged_a_kept_engine_keeps_its_folders(self):
        part = PartFacts("part", "digits", OLD, frozenset({"e4"}), frozenset({"folder", "golden"}))
        live = repository(release(4), live=4)
        entries = [entry("part", "part"), entry("engine", "folder"), entry("engine", "golden")]

        assert deleted(entries, repositories=(live,), parts=(part,)) == []

    def test_old_part_that_nothing_is_about_goes_before_its_engines(self):
        """A kill in between leaves an engine that nothing names, not a part without its engine."""
        part = PartFacts("part", "digits", OLD, frozenset({"e4"}), frozenset({"folder"}))
        entries = [entry("engine", "folder"), entry("part", "part")]

        assert deleted(entries, parts=(part,)) == ["part", "folder"]


def test_cache_stays_while_it_is_used():
    entries = [entry("result", "young", used_at=SINCE), entry("result", "old")]

    assert deleted(entries) == ["old"]


def test_entry_that_cannot_be_read_is_never_deleted():
    """A later version may have written it, and may need it."""
    assert deleted([entry("engine", "folder", readable=False)]) == []


def test_kept_entries_are_counted_by_the_first_reason():
    """What serves is kept because it serves, whatever else names it."""
    live = repository(release(1), live=1)
    entries = [entry("engine", "e1", used_at=NOW), entry("result", "r", used_at=NOW)]

    references = find_references(facts(repositories=(live,), recorded=frozenset({"e1"})))
    plan = plan_pruning(entries, references, SINCE)

    assert [(t.kind, t.reason, t.count, t.size_bytes) for t in plan.kept] == [
        ("engine", Reason.LIVE, 1, 10),
        ("result", Reason.USED, 1, 10),
    ]


@given(
    live=st.integers(1, 6),
    keep=st.integers(1, 6),
    stored=st.sets(st.integers(1, 6)),
    answers=st.lists(st.sampled_from(["", "approve", "reject"]), min_size=3, max_size=3),
    replaces=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    retired=st.booleans(),
)
def test_whatever_exists_the_live_release_and_its_evidence_stay(
    live, keep, stored, answers, replaces, retired
):
    """For every combination of what else is there; and nothing that waits loses an engine."""
    releases = tuple(release(n, has_bytes=n in stored | {live}) for n in range(1, 7))
    cards = tuple(
        card(f"w{n}", replaces=replaces[n], answer=answers[n], used_at=OLD + timedelta(n))
        for n in range(3)
    )
    known = facts(
        repositories=(repository(*releases, live=live, keep=keep),),
        scorecards=cards,
        models=frozenset() if retired else frozenset({"digits"}),
    )
    names = [*(f"{kind}{n}" for n in range(1, 7) for kind in "rce"), *(c.digest for c in cards)]
    entries = [entry("engine", name) for name in (*names, *(f"e-w{n}" for n in range(3)))]
    entries += [StoredEntry("release", r.place, 1, OLD) for r in releases if r.has_bytes]

    plan = plan_pruning(entries, find_references(known), SINCE)

    gone = {each.place.partition("/")[2] for each in plan.delete}
    assert gone.isdisjoint({f"r{live}", f"c{live}", f"e{live}", f"digits/{live}"})
    approved = {c.digest for c in cards if c.answer == "approve" and c.replaces == live}
    assert gone.isdisjoint(approved | {f"e-{digest}" for digest in approved})


def test_plan_of_an_empty_place_is_empty():
    plan = plan_pruning([], find_references(facts()), SINCE)

    assert (plan.delete, plan.kept, plan.size_bytes) == ((), (), 0)
