"""The Triton configuration of a model's releases.

The configuration is a pure function of the commit point and what was published, so that any state
can be restored, and any file on disk checked, without remembering the text.
"""

from collections.abc import Mapping
from pathlib import Path

from enginegate.atomic_io import NotRegularFileError, read_file, write_file
from enginegate.decision import ComposingModel, Release
from enginegate.repository.store.layout import (
    Current,
    Layout,
    check_loadable,
    part_config,
    published_config,
)
from enginegate.triton.config import Config, config_text
from enginegate.triton.ensemble_config import config_for_versions, with_largest_batch

_NONE: Mapping[str, set[int]] = {}


def known_digests(layout: Layout, current: Current) -> dict[int, str]:
    """The digests that configurations carry while ``current`` is live, by version."""
    return {version: layout.release(version).digest for version in current.known}


def served_versions(current: Current, release: Release) -> tuple[int, ...]:
    """Versions of the model itself that serve; of an ensemble only composing models stand by."""
    return (current.version,) if release.engine.parts else current.served


def served_config(layout: Layout, current: Current) -> Config:
    """The model's configuration while ``current`` is live.

    Batching and instances are those of the current release. It carries the digests of every known
    release: the same set before and after a rollback, so that only the version policy changes.

    Raises:
        TamperedError: the published configuration of an ensemble is not what it was.
        RepositoryError: a version that it names could not be loaded with it.
    """
    release = layout.release(current.version)
    versions = served_versions(current, release)
    published = published_config(layout, release)
    config = config_for_versions(published, versions, known_digests(layout, current))
    check_loadable(layout, config)
    return config


def right_config(layout: Layout, current: Current) -> bytes:
    """What ``config.pbtxt`` must hold while ``current`` is live."""
    return config_text(served_config(layout, current)).encode()


def part_configs(
    layout: Layout, current: Current, *, also: Mapping[str, set[int]] = _NONE
) -> dict[str, Config]:
    """Each composing model's configuration while ``current`` is live, in running order.

    A composing model takes the largest batch that any of its versions was published with: the
    ensemble that is pinned to one of them must never allow more than it does.

    Args:
        layout: of the ensemble.
        current: what is live.
        also: further versions to serve, by composing model.

    Raises:
        TamperedError: a composing model's published configuration is not what it was.
        RepositoryError: a version could not be loaded with the configuration of its model.
    """
    versions: dict[str, set[int]] = {}
    for version in reversed(current.served):
        for part in layout.release(version).engine.parts:
            versions.setdefault(part.name, set()).add(version)
    for name in versions:
        versions[name] |= also.get(name, set())
    digests = known_digests(layout, current)
    configs = {
        name: config_for_versions(_shared(layout, name, served), tuple(served), digests)
        for name, served in versions.items()
    }
    for name, config in configs.items():
        check_loadable(layout.part(name), config)
    return configs


def right_files(layout: Layout, current: Current) -> dict[Path, bytes]:
    """Every configuration file, the ensemble's last: what each must hold."""
    files = {
        layout.part(name).config: config_text(config).encode()
        for name, config in part_configs(layout, current).items()
    }
    return {**files, layout.config: right_config(layout, current)}


def wrong_files(layout: Layout, current: Current) -> dict[Path, bytes]:
    """Those that hold something else, with what they must hold."""
    right = right_files(layout, current)
    return {path: content for path, content in right.items() if not _holds(path, content)}


def put(path: Path, content: bytes) -> None:
    """A server that polls reloads what was touched; a repository may be read-only and right."""
    if not _holds(path, content):
        write_file(path, content)


def _holds(path: Path, content: bytes) -> bool:
    """Whether it is a file, and no link to one, with this content."""
    try:
        return read_file(path) == content
    except (FileNotFoundError, NotADirectoryError, NotRegularFileError):
        return False


def _shared(layout: Layout, name: str, versions: set[int]) -> Config:
    """The configuration of a model's newest published version, for all of the versions."""
    published = [
        part_config(layout, version, part)
        for version in sorted(versions)
        for part in _parts_named(layout, version, name)
    ]
    largest = max(config.serving.max_batch_size for config in published)
    return with_largest_batch(published[-1], largest)


def _parts_named(layout: Layout, version: int, name: str) -> list[ComposingModel]:
    return [part for part in layout.release(version).engine.parts if part.name == name]
