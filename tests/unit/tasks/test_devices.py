"""Parts of a qualification, one a kind of device: that all are there, and who may make one."""

import pytest

from enginegate.engines.cuda import Gpu
from enginegate.errors import EnginegateError
from enginegate.policy.devices import DeviceKind
from tasks.devices import all_made, check_device


def test_every_kind_without_a_part_is_named():
    """One message about all of them, so that nobody starts over for each."""
    ended = {"l4": EnginegateError("no worker"), "h100": EnginegateError("no pool")}

    with pytest.raises(EnginegateError, match="l4: no worker\n  h100: no pool"):
        all_made(ended)


@pytest.mark.parametrize(
    ("wanted", "name", "fits"),
    [
        ("L4", "NVIDIA L4", True),
        ("l4", "NVIDIA L40S", False),
        ("A10", "NVIDIA A100-SXM4-80GB", False),
        ("A10", "NVIDIA A10G", False),
        ("A100", "NVIDIA A100-SXM4-80GB", True),
        ("h100 pcie", "NVIDIA H100 PCIe", True),
        ("550", "NVIDIA L4", False),
        ("L4", None, False),
        ("", None, True),
    ],
)
def test_worker_has_the_gpu_of_its_kind_by_whole_words(monkeypatch, wanted, name, fits):
    """The one that engines run on; its measurements would be filed under another kind's name."""
    first = Gpu(name, "sm89") if name else None
    monkeypatch.setattr("tasks.devices.gpu", lambda: first)
    kind = DeviceKind(gpu=wanted)

    if fits:
        check_device.fn("one", kind)
    else:
        with pytest.raises(EnginegateError, match=rf"'one' .*{name or 'none'}"):
            check_device.fn("one", kind)
