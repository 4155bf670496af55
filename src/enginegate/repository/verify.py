"""Is the live repository what was published? Digests, configuration, journal, and what serves."""

from collections.abc import Callable
from functools import partial

from enginegate.canonical import Record
from enginegate.errors import EnginegateError, RepositoryError, TamperedError
from enginegate.repository.journal import Journal
from enginegate.repository.layout import Layout, models
from enginegate.repository.live import LiveRepository
from enginegate.repository.serving import LiveModel, config_is_right


class Check(Record):
    """One thing that was looked at. ``problem`` is empty when it is as it should be."""

    subject: str
    problem: str = ""


def verify(repository: LiveRepository) -> tuple[Check, ...]:
    """Check everything that can be checked from the folder, and from the server if there is one.

    Nothing is changed, and one problem never hides another.
    """
    journal = Journal(repository.root / ".enginegate-journal.jsonl")
    checks = [_checked("journal", partial(_check_journal, journal))]
    for name in models(repository.root):
        layout = Layout(repository.root, name)
        checks += [
            _checked(f"{name} release {release.version}", partial(layout.check_files, release))
            for release in layout.releases()
            if layout.version_folder(release.version).is_dir()
        ]
        checks.append(_checked(f"{name} config.pbtxt", partial(_check_config, layout)))
        if repository.client is not None:
            live = LiveModel(repository.client, layout, repository.load_timeout_s)
            checks.append(_checked(f"{name} on the live server", partial(_check_served, live)))
    return tuple(checks)


def _checked(subject: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except EnginegateError as error:
        return Check(subject=subject, problem=str(error))
    return Check(subject=subject)


def _check_journal(journal: Journal) -> None:
    unfinished = journal.unfinished()
    if unfinished:
        entry = unfinished[0]
        raise RepositoryError(
            f"A {entry.kind} of {entry.model} release {entry.version} was cut short after its step "
            f"'{entry.step}'. Finish or undo it with `enginegate verify --repair`."
        )


def _check_config(layout: Layout) -> None:
    current = layout.current()
    if current is None:
        raise RepositoryError(f"{layout.current_file} is missing: nothing says what is live.")
    if not config_is_right(layout, current):
        raise TamperedError(
            f"{layout.config} is not what release {current.version} was published with. Find "
            "out who changed it, then put it back with `enginegate verify --repair`."
        )


def _check_served(live: LiveModel) -> None:
    current = live.layout.current()
    if current is not None:
        live.prove(current, live.layout.release(current.version), wait=False)
