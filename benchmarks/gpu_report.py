"""What a GPU benchmark found so far, on disk after every part: a rented GPU may be taken away."""

import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginegate.engines import availability, cuda


class Report:
    """Rows of one script, in one JSON file that is written anew after each."""

    def __init__(self, path: Path, *, limit_s: float = float("inf")) -> None:
        self._path, self._ends = path, time.monotonic() + limit_s
        self.rows: list[dict[str, Any]] = []
        self._head = {"schema_version": 2, "machine": machine()}
        self.write()

    @property
    def left_s(self) -> float:
        """Seconds until parts are left out."""
        return self._ends - time.monotonic()

    def part(self, name: dict[str, Any], measure: Callable[[dict[str, Any]], None]) -> None:
        """Run one part, which fills its row; a failure is kept in the row, and others go on.

        A part that begins after the time limit is left out, and that is said.
        """
        row = dict(name)
        self.rows.append(row)
        if self.left_s <= 0:
            row["error"] = "not measured: the time limit of this run was used up"
        else:
            started = time.monotonic()
            try:
                measure(row)
            except Exception as error:  # noqa: BLE001 - the other parts' numbers must not be lost
                print(traceback.format_exc(limit=-6), flush=True)
                row["error"] = f"{type(error).__name__}: {error}"
            row["took_s"] = round(time.monotonic() - started, 1)
        self.write()
        shown = {key: value for key, value in row.items() if key not in {"measured", "detail"}}
        print(json.dumps(shown, default=str)[:1500], flush=True)

    def write(self) -> None:
        """Put what is known on disk."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        found = self._head | {"rows": self.rows}
        self._path.write_text(json.dumps(found, indent=1, default=str) + "\n")


def table(columns: list[str], rows: list[list[Any]]) -> None:
    """Print a Markdown table; numbers from 100 on without decimals."""
    print("\n| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(_cell(value) for value in row) + " |")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - see table()
    return "-" if value is None else str(value)


def machine() -> dict[str, Any]:
    """What the numbers are of."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit"]
    try:
        asked = subprocess.run(  # noqa: S603 - a fixed command
            [*query, "--format=csv,noheader"], capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        asked = "no nvidia-smi"
    return {
        "gpu": str(cuda.gpu()),
        "nvidia_smi": asked,
        "kinds": {each.kind: each.library or each.why_not for each in availability()},
        "python": platform.python_version(),
        "weights": "random",
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
