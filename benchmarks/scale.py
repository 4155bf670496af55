"""Many models, a long audit log, a large registry, a fleet: time and memory of each.

A repository of 1,000 models with 50 releases each, and an audit log of a million lines, is written
as that many promotions would have left it (lab/populated.py), and a quarter of it, to see what
grows. `status` and `verify` run as commands on it, start of Python included. 10,000 versions in
MLflow's registry are scanned. A release is rolled out to 50 and to 500 servers that are simulated
in memory, each with a repository of its own, by the promotion's own code; then servers die at
random in the middle of roll-outs, and are repaired.

``python benchmarks/scale.py`` prints a table and writes results/scale.json (half an hour at most);
``--models 100 --lines 100000 --servers 50 --versions 1000`` measures less, ``--only fleet`` one
part, whose rows replace those that are there. Where other work takes the cores, the time of the
processor tells more than the clock: both are in every row.
"""

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.lab.figures import RESULTS, keep, machine  # noqa: E402
from benchmarks.lab.populated import Populated, model_name  # noqa: E402
from enginegate.errors import EnginegateError  # noqa: E402
from enginegate.repository import Fleet, Layout, LiveRepository  # noqa: E402
from enginegate.repository.rollout.target import FleetServer  # noqa: E402
from tests.fakes.live_triton import FakeTriton, package_in  # noqa: E402

ENGINEGATE = str(Path(sys.executable).with_name("enginegate"))
_SETTLED_S = 2.5
_PROMOTED = 10
_DEATHS = 10


@dataclass(frozen=True)
class Ran:
    """One command that ended well.

    Attributes:
        cpu_s: of all its threads.
        peak_mib: the most memory that its process had.
    """

    seconds: float
    cpu_s: float
    peak_mib: float
    said: str


def run(*command: str, cwd: Path) -> Ran:
    """Run a command to its end; its time includes the start of Python.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryFile("w+") as said:
        began_s = time.perf_counter()
        process = subprocess.Popen(  # noqa: S603 - our own
            command, cwd=cwd, stdout=said, stderr=subprocess.STDOUT, env=os.environ | _quiet()
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began_s
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{text[-2000:]}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ran(seconds, cpu_s, usage.ru_maxrss / 1024, text)


def _quiet() -> dict[str, str]:
    return {"PREFECT_LOGGING_LEVEL": "ERROR", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}


class Table:
    """Rows of the result, printed as they come."""

    def __init__(self) -> None:
        """Without rows."""
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, size: str, ran: Ran, **more: float) -> None:
        """One measurement, with the machine's load while it ran."""
        load = round(os.getloadavg()[0], 1)
        row = {"what": what, "size": size, "seconds": round(ran.seconds, 2)}
        row |= {"cpu_s": round(ran.cpu_s, 2), "peak_mib": round(ran.peak_mib), "load": load}
        self.rows.append(row | {name: round(value, 3) for name, value in more.items()})
        extra = "".join(f", {name} {value:.3g}" for name, value in more.items())
        took = f"{ran.seconds:.2f} s | {ran.cpu_s:.2f} s | {ran.peak_mib:.0f} MiB"
        print(f"| {what} | {size} | {took} | {load}{extra} |", flush=True)


def measure_repository(table: Table, place: Path, models: int, releases: int, lines: int) -> None:
    """Write a repository and a project around it; ask and verify it by command."""
    size = f"{models:,} x {releases}, {lines:,} lines"
    Populated(place / "live", models, releases, lines).make()
    _write_policies(place, models)
    first, every = f"policies/{model_name(0)}.toml", [ENGINEGATE]
    table.add("status, first time", size, run(*every, "status", first, cwd=place))
    table.add("status of one model", size, run(*every, "status", first, cwd=place))
    time.sleep(_SETTLED_S)
    table.add("status of every model, first time", size, run(*every, "status", cwd=place))
    table.add("status of every model", size, run(*every, "status", cwd=place))
    ran = run(*every, "verify", "--all", cwd=place)
    table.add("verify --all", size, ran, ms_a_release=ran.seconds * 1e3 / (models * releases))
    table.add("verify, nothing changed", size, run(*every, "verify", cwd=place))
    promoted = min(_PROMOTED, models)
    ran = run(sys.executable, __file__, "--one", "promote", str(promoted), cwd=place)
    table.add(f"{promoted} promotions", size, ran, s_each=json.loads(ran.said)["s_each"])
    time.sleep(_SETTLED_S)
    table.add(f"verify, {promoted} models changed", size, run(*every, "verify", cwd=place))
    table.add("status of one model", f"{size}, after", run(*every, "status", first, cwd=place))


def _write_policies(place: Path, models: int) -> None:
    """A policy for each model, all of one repository."""
    text = (ROOT / "policies" / "digits.toml").read_text()
    text = text.replace('repository = ".enginegate/live/digits"', 'repository = "live"')
    (place / "policies").mkdir()
    (place / ".enginegate").mkdir()
    for number in range(models):
        name = model_name(number)
        own = text.replace('name = "digits"', f'name = "{name}"', 1)
        (place / "policies" / f"{name}.toml").write_text(own)


def promote(count: int) -> dict[str, float]:
    """One more release of each of the first models; seconds of each."""
    root = Path("live").absolute()
    repository = LiveRepository(root, FakeTriton(root), load_timeout_s=1.0, keep=1000)
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        for number in range(count):
            name = model_name(number)
            current = Layout(root, name).current()
            package = package_in(Path(folder), 1.0, model=name)
            repository.publish(package, expected=current.version if current else None)
        return {"s_each": (time.perf_counter() - began_s) / count}


def roll_out(servers: int, deaths: int = _DEATHS) -> dict[str, float]:
    """Roll out to so many servers, then with deaths at random; seconds a server of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = _fleet(folder, servers)
        fleet.publish(package_in(folder, 1.0), expected=None)
        began_s = time.perf_counter()
        fleet.publish(package_in(folder, 2.0), expected=1)
        undisturbed_s = time.perf_counter() - began_s
        chance, refused, wrong, live = random.Random(7), 0, 0, 2  # noqa: S311 - which server dies
        began_s = time.perf_counter()
        for offset in range(3, 3 + deaths):
            dying = chance.choice(fleet.servers)
            triton = dying.repository.client
            if not isinstance(triton, DyingTriton):
                raise TypeError(triton)
            triton.dies_at_load = True
            try:
                live = fleet.publish(package_in(folder, float(offset)), expected=live).version
            except EnginegateError:
                refused += 1
            triton.dead = triton.dies_at_load = False
            fleet.repair()
            wrong += not fleet.serves("digits")
        disturbed_s = time.perf_counter() - began_s
    return {
        "ms_a_server": undisturbed_s / servers * 1e3,
        "died": deaths,
        "refused": refused,
        "wrong": wrong,
        "ms_a_server_with_death_and_repair": disturbed_s / deaths / servers * 1e3,
    }


class DyingTriton(FakeTriton):
    """A server in memory that can die in the middle of a load."""

    dies_at_load = False

    def load(self, model: str, config: Any, *, timeout_s: float = 0.0) -> None:
        """Load, or die: the process is gone, and what it had loaded with it."""
        if self.dies_at_load:
            self.dead = True
            self.loaded.clear()
        super().load(model, config, timeout_s=timeout_s)


def _fleet(folder: Path, servers: int) -> Fleet:
    def host(name: str) -> LiveRepository:
        root = folder / name / "live"
        root.mkdir(parents=True)
        triton: Any = DyingTriton(root)
        return LiveRepository(root, triton, load_timeout_s=1.0)

    primary = host("primary")
    others = (replace(primary, root=h.root, client=h.client) for h in map(host, _names(servers)))
    return Fleet(
        primary,
        tuple(FleetServer(each.root.parent.name, each, primary) for each in others),
    )


def _names(servers: int) -> list[str]:
    return [f"server-{number:03d}" for number in range(servers)]


def scan(versions: int) -> dict[str, float]:
    """Find what is new among so many versions with the tag: all of them, then none."""
    from enginegate.policy import read_policy  # noqa: PLC0415
    from enginegate.policy.operating import Scan  # noqa: PLC0415
    from enginegate.workspace import Workspace  # noqa: PLC0415
    from tasks.scan import new_versions  # noqa: PLC0415

    rules = read_policy(ROOT / "policies" / "digits.toml")
    with tempfile.TemporaryDirectory() as name:
        workspace = Workspace(Path(name))
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        _register(workspace, versions)
        took_s, asked = [], (Scan(tag="ready"), rules.model, rules.digest_for, workspace)
        for _ in range(2):
            began_s = time.perf_counter()
            starts = new_versions.fn(*asked)
            took_s.append(time.perf_counter() - began_s)
            for start in starts:
                start.started()
    return {"all_new_s": took_s[0], "none_new_s": took_s[1]}


def _register(workspace: Any, versions: int) -> None:
    """One version by MLflow; its row and its tag for all others."""
    from enginegate.tracking import Tracker  # noqa: PLC0415

    client = Tracker(workspace.tracking_uri, workspace.artifacts).client
    client.create_registered_model("digits")
    client.create_model_version("digits", "file:///nowhere", tags={"ready": "yes"})
    with closing(sqlite3.connect(workspace.root / "mlflow.db")) as database, database:
        for table in ("model_versions", "model_version_tags"):
            rows = database.execute(f"pragma table_info({table})")
            names = [row[1] for row in rows]
            wanted = ", ".join("?" if name == "version" else name for name in names)
            query = f"insert into {table} select {wanted} from {table} where version = 1"  # noqa: S608
            database.executemany(query, ((number,) for number in range(2, versions + 1)))


def main() -> None:
    """Measure all of it; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--releases", type=int, default=50)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--servers", type=int, default=500)
    parser.add_argument("--versions", type=int, default=10_000)
    parser.add_argument("--deaths", type=int, default=_DEATHS)
    parser.add_argument("--only", choices=("repository", "fleet", "scan"))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        count = int(given.one[1])
        if given.one[0] == "roll_out":
            found = roll_out(count, given.deaths)
        else:
            found = promote(count) if given.one[0] == "promote" else scan(count)
        print(json.dumps(found))
        return
    table = Table()
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        for share in (4, 1) if given.only in {None, "repository"} else ():
            place = Path(name) / str(share)
            place.mkdir()
            models, lines = given.models // share, given.lines // share
            measure_repository(table, place, models, given.releases, lines)
        for servers in _sizes(given.servers, given.only in {None, "fleet"}):
            asked = ("--one", "roll_out", str(servers), "--deaths", str(given.deaths))
            ran = run(sys.executable, __file__, *asked, cwd=Path(name))
            table.add("roll-out", f"{servers:,} servers", ran, **_last(ran))
        for versions in _sizes(given.versions, given.only in {None, "scan"}):
            ran = run(sys.executable, __file__, "--one", "scan", str(versions), cwd=Path(name))
            table.add("scan", f"{versions:,} versions", ran, **_last(ran))
    about = machine() | {"processor": _processor(), "cores": os.cpu_count()}
    rows = [*_others(given.only), *table.rows]
    print(f"\n{keep('scale', {'machine': about, 'rows': rows})}")


def _sizes(most: int, wanted: object) -> tuple[int, ...]:
    return (most // 10, most) if wanted else ()


def _others(only: str | None) -> list[dict[str, Any]]:
    """Rows of the parts that are not measured now."""
    if only is None or not (RESULTS / "scale.json").is_file():
        return []
    rows: list[dict[str, Any]] = json.loads((RESULTS / "scale.json").read_text())["rows"]
    part = {"roll-out": "fleet", "scan": "scan"}
    return [row for row in rows if part.get(row["what"], "repository") != only]


def _last(ran: Ran) -> dict[str, float]:
    found: dict[str, float] = json.loads(ran.said.splitlines()[-1])
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "not known"


if __name__ == "__main__":
    main()
