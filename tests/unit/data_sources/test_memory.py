"""Data that is larger than memory is read in as much memory as any other."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

_SET_MIB = 160
# Reads a set in a process of its own; prints by how many MiB memory grew that no file backs.
_PROGRAM = """
import threading
from pathlib import Path

import pyarrow.parquet

from enginegate.candidate import TensorSpec
from enginegate.data_sources import load_data


def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def watch():
    while not ended.wait(0.002):
        peaks.append(held())


start, peaks, ended = held(), [], threading.Event()
watching = threading.Thread(target=watch)
watching.start()
data = load_data(Path("large.parquet"))
data.check_fits((TensorSpec(name="x", dtype="float32", shape=(-1, 65536)),))
digest = data.sha256
rows = sum(len(batch["x"]) for batch in data.batches(64))
ended.set()
watching.join()
print(rows, round(max(peaks) - start))
"""


@pytest.mark.slow
def test_memory_stays_below_the_sets_size(tmp_path):
    """One row group, which a reader would like to take whole; converted, checked, digested, run."""
    (tmp_path / "pyproject.toml").touch()
    kind = pa.list_(pa.float32(), 1 << 16)
    values = np.random.default_rng(0).random(1 << 20, np.float32)  # nothing to compress
    rows = pa.FixedSizeListArray.from_arrays(values, type=kind)
    table = pa.table({"input.x": pa.chunked_array([rows] * (_SET_MIB // 4))})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=1 << 20, use_dictionary=False)

    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )

    count, grown_mib = map(int, done.stdout.split())
    assert count == _SET_MIB * 4
    assert grown_mib < 0.75 * _SET_MIB
