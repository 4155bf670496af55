"""Parts in object storage: a real server program between two workspaces that share no folder."""

import pytest

from enginegate.devices import PartStore, fetch_part, push_part
from enginegate.errors import TamperedError
from enginegate.policy.devices import DeviceKind
from enginegate.workspace import Workspace
from flows.pools import is_made
from tests.fakes.evidence import sha
from tests.fakes.parts import part


def test_part_travels_through_object_storage(store, tmp_path):
    """Engines and golden answers with it; whoever pushes last is right."""
    there, here = Workspace(tmp_path / "there"), Workspace(tmp_path / "here")
    made = part(there)

    assert fetch_part(made.identity, here, store) is None
    for _ in range(2):
        push_part(made, there, store)

    assert fetch_part(made.identity, here, store) == made
    assert PartStore(here).find(made.identity) == made


def test_part_in_object_storage_needs_no_pool(store, tmp_path):
    """Its pool may be gone by now: nothing is asked of it."""
    there, here = Workspace(tmp_path / "there"), Workspace(tmp_path / "here")
    made, kind = part(there), DeviceKind(pool="gone", store=store.url)
    assert not is_made(made.identity, kind, here)

    push_part(made, there, store)

    assert is_made(made.identity, kind, here)


def test_part_under_another_name_is_refused(store, tmp_path):
    """Whoever may write there cannot pass one policy's evidence off as another's."""
    there, here = Workspace(tmp_path / "there"), Workspace(tmp_path / "here")
    made = part(there)
    other = made.identity.model_copy(update={"policy_sha256": sha("9")})
    push_part(made, there, store)
    own, wanted = (f"parts/{each.digest}.evidence" for each in (made.identity, other))
    store.write(wanted, store.read(own).content)

    with pytest.raises(TamperedError, match=r"something else .*policy_sha256"):
        fetch_part(other, here, store)
