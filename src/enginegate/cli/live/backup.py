"""`backup` and `restore`: one file of all that cannot be made again, and the way back from it."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from enginegate.atomic_io import read_file
from enginegate.backup import (
    BackupHeader,
    BackupPlaces,
    OpeningKey,
    RepositoryPlace,
    RestorePlaces,
    SealingKey,
    backup_header,
    restore_backup,
    write_backup,
)
from enginegate.cli.output.json_output import JsonFlag, Printer, printing
from enginegate.cli.output.records import BackupDocument, LeftOutOfBackup, RestoreDocument
from enginegate.cli.policies import policies_of
from enginegate.cli.terminal import err
from enginegate.errors import InputError
from enginegate.messages import counted
from enginegate.policy import Policy, read_policy
from enginegate.policy.paths import as_written, project_of
from enginegate.report.tables import print_hanging
from enginegate.workspace import Workspace

PASSPHRASE = "ENGINEGATE_BACKUP_PASSPHRASE"  # noqa: S105 - the variable's name
_OUTSIDE = "outside of the project's folder: keep it where you keep such files"
_STORAGE = "object storage: use the provider's versions or replication"
_ENCRYPTED = {"passphrase": "with a passphrase", "recipients": "for public keys"}
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"holds the passphrase; default: the variable {PASSPHRASE}, else it is asked for",
    ),
]


def backup_command(  # noqa: PLR0913 - one argument for each option
    file: Annotated[Path, typer.Argument(metavar="FILE", help="to write; there must be none")],
    policies: Annotated[list[Path] | None, typer.Argument(metavar="[POLICY]…")] = None,
    passphrase_file: PassphraseFile = None,
    recipient: Annotated[
        list[str] | None,
        typer.Option(help="public key (age1…, ssh-ed25519 …) instead of a passphrase; may repeat"),
    ] = None,
    *,
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="leave private keys out")
    ] = False,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="take recorded requests in, which hold users' data")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write live repositories, workspace, policies and keys into one file, whole or not at all.

    Of the policies named, else of all in policies/. Promotions and rollbacks go on meanwhile.
    Private keys are encrypted; the rest is not, so the file is its owner's alone. MLflow's and
    Prefect's databases are not in it: docs/backup.md says how to keep them.
    """
    places = _places([(each, read_policy(each)) for each in policies_of(policies)])
    key = None
    given = passphrase_file or recipient or os.environ.get(PASSPHRASE)
    if not without_keys and (places.secrets() or given):
        passphrase = "" if recipient else _passphrase(passphrase_file, confirm=True)
        key = SealingKey(passphrase, tuple(recipient or ()))
    with printing(as_json=as_json) as output:
        with _progress("Writing") as progress:
            made = write_backup(file, places, key, shadow=shadow, progress=progress)
        size = f"{made.file.size_bytes / 2**20:,.1f} MiB"
        out = output.console
        print_hanging(out, f"{file}: {counted(made.files, 'file')}, {size}")
        out.print(Text(f"sha256  {made.file.sha256}"), soft_wrap=True)
        _print_contents(made.header, output)
        command = f"enginegate restore {shlex.quote(str(file))} --check"
        out.print(f"Try it: {command}", markup=False, soft_wrap=True)
        output.document(
            BackupDocument(
                file=str(file.absolute()),
                sha256=made.file.sha256,
                size_bytes=made.file.size_bytes,
                made_at=made.header.made_at,
                files=made.files,
                keys=made.header.keys,
                repositories=tuple(each.written for each in made.header.repositories),
                policies=made.header.policies,
                left_out=_left_out(made.header),
            )
        )


def restore_command(  # noqa: PLR0913 - one argument for each option
    file: Annotated[Path, typer.Argument(metavar="FILE", help="that backup wrote")],
    to: Annotated[
        Path | None, typer.Option(help="the project's folder; default: the one here")
    ] = None,
    repository: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD[=NEW]",
            help="where a live repository outside of the project's folder goes; may repeat",
        ),
    ] = None,
    sha256: Annotated[
        str, typer.Option(help="what the file's digest must begin with, as backup printed it")
    ] = "",
    passphrase_file: PassphraseFile = None,
    identity: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="private key of a recipient, of age or OpenSSH"),
    ] = None,
    *,
    without_keys: Annotated[
        bool, typer.Option("--without-keys", help="restore all but private keys")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="only read the file and compare every digest")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring a backup to an empty place; it is checked whole before anything is written.

    Nothing is replaced: a workspace or a live repository that is not empty is refused by name. Try
    a restore in an empty folder with --to FOLDER, then `enginegate verify` there.
    """
    header = backup_header(file)
    key = None if without_keys else _opening_key(header, passphrase_file, tuple(identity or ()))
    project = to.resolve() if to is not None else project_of(Path.cwd())
    where = RestorePlaces(project, Workspace.of_project(project), _moved(repository or ()))
    with printing(as_json=as_json) as output:
        with _progress("Checking") as progress:
            done = restore_backup(
                file, None if check else where, key, sha256=sha256, progress=progress
            )
        out = output.console
        made = f"made {done.header.made_at:%Y-%m-%d %H:%M} UTC by {done.header.made_by}"
        print_hanging(out, f"{file} is whole: {counted(done.files, 'file')}, {made}")
        _print_contents(done.header, output)
        for place in done.places:
            print_hanging(out, str(place), "restored  ")
        if done.header.sealed_for is None and not sha256:
            print_hanging(
                out,
                "It has no encrypted part, so only --sha256 can show that nobody changed it.",
            )
        if done.header.keys and not done.keys:
            print_hanging(out, "Private keys were neither opened nor restored.")
        if not check:
            folder = "" if project == Path.cwd() else f"cd {shlex.quote(str(project))} && "
            out.print(f"Next: {folder}enginegate verify", markup=False, soft_wrap=True)
        output.document(
            RestoreDocument(
                file=str(file.absolute()),
                sha256=done.file.sha256,
                made_at=done.header.made_at,
                made_by=done.header.made_by,
                files=done.files,
                keys=done.keys,
                restored=tuple(map(str, done.places)),
                left_out=_left_out(done.header),
            )
        )


def _places(policies: Sequence[tuple[Path, Policy]]) -> BackupPlaces:
    """What the policies of one project have on this machine.

    Raises:
        InputError: they are of several projects.
    """
    first = policies[0][1]
    project, workspace = first.root or project_of(Path.cwd()), Workspace.of(first)
    roots: dict[Path, RepositoryPlace] = {}
    files: dict[str, Path] = {}
    private: dict[str, Path] = {}
    elsewhere: dict[str, str] = {}
    for path, policy in policies:
        if Workspace.of(policy) != workspace:
            raise InputError(
                f"{path} is of another project than {policies[0][0]}: {policy.root}. Back up each "
                "project on its own."
            )
        for folder in (
            policy.target.repository,
            *(entry.repository for entry in policy.target.fleet if entry.repository),
        ):
            roots.setdefault(
                folder.absolute(), RepositoryPlace(str(as_written(folder)), folder.absolute())
            )
        if policy.target.objects:
            elsewhere[policy.target.objects] = _STORAGE
        signing = policy.signing
        for found, into in (
            (path.absolute(), files),
            (signing.public_key, files),
            (signing.private_key, private),
        ):
            if found is None or not found.is_file():
                continue
            if not found.is_relative_to(project):
                elsewhere[str(found)] = _OUTSIDE
            elif not found.is_relative_to(workspace.keys if into is private else workspace.root):
                into[found.relative_to(project).as_posix()] = found
    return BackupPlaces(project, workspace, tuple(roots.values()), files, private, elsewhere)


def _moved(given: Sequence[str]) -> dict[str, Path]:
    """OLD[=NEW] of each --repository."""
    pairs = (each.partition("=") for each in given)
    return {old: Path(new or old).absolute() for old, _, new in pairs}


def _opening_key(
    header: BackupHeader, passphrase_file: Path | None, identities: tuple[Path, ...]
) -> OpeningKey | None:
    """What opens a backup's keys; a passphrase is asked for before the file is read whole.

    Raises:
        InputError: what was given does not fit how they were encrypted.
    """
    if header.sealed_for is None:
        # Whoever forges a backup takes its encrypted part out, and asks nobody for a passphrase.
        if passphrase_file is not None or identities or os.environ.get(PASSPHRASE):
            raise InputError(
                "This backup has no encrypted part, and something that opens one was given: it is "
                "another backup than you mean, or its keys were taken out. If it was made "
                "--without-keys, restore it so."
            )
        return None
    if header.sealed_for == "recipients" and not identities:
        raise InputError(
            "The private keys in this backup are encrypted for public keys: name the private key "
            "of one with --identity FILE. --without-keys restores all but them."
        )
    if header.sealed_for == "passphrase" and identities:
        raise InputError("The private keys in this backup are encrypted with a passphrase.")
    passphrase = "" if identities else _passphrase(passphrase_file, confirm=False)
    return OpeningKey(lambda: passphrase, identities)


def _passphrase(file: Path | None, *, confirm: bool) -> str:
    """From the file, the variable or the person at the terminal; it is in no message.

    Raises:
        InputError: there is none of them.
    """
    if file is not None:
        try:
            return read_file(file, follow_links=True).decode().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise InputError(f"The passphrase file {file} cannot be read: {reason}.") from None
    if given := os.environ.get(PASSPHRASE):
        return given
    if not sys.stdin.isatty():
        raise InputError(
            "Private keys are encrypted, and there is no terminal to ask for a passphrase. Give it "
            f"with --passphrase-file FILE or in {PASSPHRASE}; --recipient and --identity take "
            "public and private keys instead; --without-keys leaves private keys out."
        )
    asked: str = typer.prompt(
        "Passphrase of the backup", hide_input=True, confirmation_prompt=confirm, err=True
    )
    return asked


@contextmanager
def _progress(word: str) -> Iterator["_Bar | None"]:
    """A bar on a terminal, which is gone when the block ends; nothing elsewhere."""
    if not err.is_terminal:
        yield None
        return
    columns = (TextColumn(word), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        yield _Bar(bar)


class _Bar:
    """Called with how many bytes are done, and of how many."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)


def _print_contents(header: BackupHeader, output: Printer) -> None:
    out = output.console
    for repository in header.repositories:
        published = ", ".join(repository.models) or "nothing published"
        print_hanging(out, f"live repository {repository.written}: {published}", "holds     ")
    for policy in header.policies:
        print_hanging(out, policy, "holds     ")
    if header.keys and header.sealed_for:
        keys = counted(header.keys, "file of keys", "files of keys")
        print_hanging(out, f"{keys}, encrypted {_ENCRYPTED[header.sealed_for]}", "holds     ")
    for each in header.left_out:
        print_hanging(out, f"{each.what}: {each.why}", "left out  ")


def _left_out(header: BackupHeader) -> tuple[LeftOutOfBackup, ...]:
    return tuple(LeftOutOfBackup(what=each.what, why=each.why) for each in header.left_out)
