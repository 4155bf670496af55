"""What an upgrade of a server does to what is live there, said before it is restarted.

A TensorRT plan loads in the very version that built it. A server that was upgraded on disk serves
on until it is restarted, loads its models again then, and fails at the plan: the release that is
live is gone, and so is the one that a rollback would return to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from enginegate.contract.server_versions import ServerVersions
from enginegate.decision import Release
from enginegate.errors import RepositoryError
from enginegate.repository.store.layout import Layout

_LIBRARY = "tensorrt"


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """A release whose engine has to go on loading.

    Attributes:
        release: its manifest.
        role: why it matters, e.g. "is live".
    """

    release: Release
    role: str

    def __str__(self) -> str:
        engine = self.release.engine
        return (
            f"release {self.release.version} of {self.release.model} ({engine.candidate}, built by "
            f"{engine.builder}), which {self.role},"
        )


@dataclass(frozen=True, slots=True)
class UpgradeFinding:
    """Why an engine does not load any more.

    Attributes:
        certain: it was read from the server's machine; else it is what is usual for its version.
    """

    certain: bool
    words: str


def live_engines(layout: Layout) -> tuple[LiveEngine, ...]:
    """What is live, and what a rollback would return to if its bytes are here."""
    current = layout.current()
    if current is None:
        return ()
    live = layout.release(current.version)
    found = [LiveEngine(live, "is live")]
    before = live.previous_version
    if before is not None and layout.has_bytes(before):
        try:
            found.append(LiveEngine(layout.release(before), "a rollback would return to"))
        except RepositoryError:
            return tuple(found)
    return tuple(found)


def find_upgrades(
    engines: Sequence[LiveEngine], server: ServerVersions, *, policy: str
) -> tuple[UpgradeFinding, ...]:
    """Compare what a server has, and will have, with what engines were built by.

    Args:
        engines: that have to go on loading.
        server: what it has.
        policy: path of the policy file, for the command that builds them again.
    """
    found = [finding for each in engines for finding in _of_plan(each, server, policy)]
    on_gpu = [each for each in engines if each.release.engine.gpu]
    driver, installed = server.driver, server.installed_driver
    if on_gpu and driver and installed and driver != installed:
        words = (
            f"The NVIDIA driver on the machine of {server.address} was upgraded on disk from "
            f"{driver} to {installed}, and the kernel still has {driver}: until the machine is "
            f"restarted a new process gets no GPU, so {on_gpu[0]} cannot be loaded again. Take "
            "the server out of rotation and restart the machine; then `enginegate verify`."
        )
        found.append(UpgradeFinding(certain=True, words=words))
    return tuple(found)


def _of_plan(each: LiveEngine, server: ServerVersions, policy: str) -> Iterator[UpgradeFinding]:
    """Only Triton's own backend loads plans with the server's library."""
    library, _, built = each.release.engine.builder.partition(" ")
    if library != _LIBRARY or each.release.engine.backend != _LIBRARY:
        return
    at, again = f"the server at {server.address}", _again(each.release, policy)
    named = f"R{str(each)[1:]}"
    if server.tensorrt and not _loads(each.release, built, server.tensorrt):
        words = f"{named} does not load on {at}, which has TensorRT {server.tensorrt}. "
        yield UpgradeFinding(certain=True, words=words + again.format(server.tensorrt))
    coming = server.installed_tensorrt
    if coming and coming != server.tensorrt and not _loads(each.release, built, coming):
        words = (
            f"{named} will not load when {at} is restarted: TensorRT {coming} was installed there "
            f"beneath it, and it still has {server.tensorrt or 'another one'}. Do not restart it "
            "before a release for the new version is ready. "
        )
        yield UpgradeFinding(certain=True, words=words + again.format(coming))
    usual = server.usual_tensorrt
    if usual and not server.tensorrt and not _loads(each.release, built, usual):
        words = (
            f"{named} may not load on {at}: it runs Triton {server.triton}, whose images had "
            f"TensorRT {usual}, as far as is known. "
        )
        yield UpgradeFinding(certain=False, words=words + again.format(usual))


def _again(release: Release, policy: str) -> str:
    """With a place for the version that engines are to be built with."""
    return (
        "Build it again and qualify it for that version, where TensorRT {} is installed (the "
        "server's own image has it): "
        f"enginegate qualify {policy} --model {release.model_uri}"
    )


def _loads(release: Release, built: str, found: str) -> bool:
    """Whether a plan loads; a version that is known in part speaks for that part only."""
    mine, theirs = built.split("."), found.split(".")
    known = min(len(mine), len(theirs))
    if mine[:known] == theirs[:known]:
        return True
    newer = [int(part) for part in theirs[:known]] > [int(part) for part in mine[:known]]
    return release.engine.version_compatible and newer
