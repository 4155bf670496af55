"""The Triton configuration that each release was published with, whatever else is live."""

from enginegate.decision import ComposingModel, Release
from enginegate.errors import RepositoryError
from enginegate.repository.store.layout import Layout
from enginegate.triton.config import Config, model_config, read_config
from enginegate.triton.version_sharing import sharing_obstacle

ENSEMBLE_FILE = "ensemble.pbtxt"


def engine_config(release: Release) -> Config:
    """The configuration that a release of one engine asks for."""
    engine = release.engine
    return model_config(
        name=release.model,
        inputs=release.inputs,
        outputs=release.outputs,
        serving=engine.serving,
        backend=engine.backend,
        parameters={},
        gpu=engine.gpu,
        options=engine.options,
        settings=engine.settings,
    )


def published_config(layout: Layout, release: Release) -> Config:
    """That of a release's own model: of its engine, or of the ensemble around it.

    Raises:
        TamperedError: the published configuration of an ensemble is not what it was.
    """
    if not release.engine.parts:
        return engine_config(release)
    path = layout.version_folder(release.version) / ENSEMBLE_FILE
    release.engine.files[ENSEMBLE_FILE].check(path)
    return read_config(path.read_text(), str(path))


def part_config(layout: Layout, version: int, part: ComposingModel) -> Config:
    """That of one part.

    Raises:
        TamperedError: it is not the one that was published.
    """
    path = layout.part_file(version, part.name, "pbtxt")
    part.config.check(path)
    return read_config(path.read_text(), str(path))


def check_loadable(layout: Layout, config: Config) -> None:
    """Refuse a configuration with a version whose folder lacks the file that its backend opens.

    Triton 2.51 never ends the load of a Python model without its file, and from then on no other
    load of that model either, until it is started again.

    Raises:
        RepositoryError: a file is not there; names it.
    """
    for version in config.versions or ():
        path = layout.version_folder(version) / config.opened_file
        if config.opened_file and not path.exists():
            raise RepositoryError(
                f"Version {version} of {layout.model} cannot be loaded in Triton's "
                f"{config.backend or config.message.platform} backend: {path} is not there. Triton "
                "was not asked, because such a load may never end."
            )


def why_not_beside(live: Release, release: Release) -> str:
    """Why the live release cannot stay loaded beside a new one; empty: it can stand by.

    Both versions of a model share one configuration, which is the new release's: it must be able
    to load the older one's files too. The parts of an ensemble are models of their own, and
    staging looks at each.
    """
    if bool(live.engine.parts) != bool(release.engine.parts):
        return "an engine and an ensemble share no configuration"
    return (
        ""
        if release.engine.parts
        else sharing_obstacle(engine_config(live), engine_config(release))
    )
