"""Where releases go and who may approve them: what these tables refuse."""

import pytest
from pydantic import ValidationError

from enginegate.policy.operating import Approval, PromotionTarget, ServerEntry


@pytest.mark.parametrize(
    ("approvers", "required", "message"),
    [
        pytest.param(("ada", "bo"), 3, "required is 3, and approvers names 2", id="too-few"),
        pytest.param(("ada", "Ada@x"), 1, "'ada' and 'Ada@x' are one person", id="twice"),
        pytest.param((" @x",), 1, "' @x' names nobody", id="nobody"),
    ],
)
def test_approvers_are_different_people(approvers, required, message):
    """Neither case nor what follows @ makes another person of one."""
    with pytest.raises(ValidationError, match=message):
        Approval(approvers=approvers, required=required, expires_hours=1)


@pytest.mark.parametrize("folder", ["/", "//", "./", "/etc", "/usr/"])
def test_releases_need_a_folder_of_their_own(folder):
    """Files are moved and removed in a live repository."""
    with pytest.raises(ValidationError, match="cannot be meant"):
        PromotionTarget(repository=folder)


@pytest.mark.parametrize("address", ["host", "host:0", "host:99999", "http://host:1"])
def test_address_has_host_and_port(address):
    with pytest.raises(ValidationError, match="endpoint"):
        ServerEntry(name="b", endpoint=address)


def test_servers_of_a_fleet_have_different_names():
    servers = [{"name": "b", "endpoint": "host:1"}, {"name": "b", "endpoint": "host:2"}]

    with pytest.raises(ValidationError, match="same name"):
        PromotionTarget(repository="/srv/models", fleet=servers)
