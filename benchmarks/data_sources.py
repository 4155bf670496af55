"""Memory and speed of reading data of each form: ``python benchmarks/data_sources.py [MIB ...]``.

For each form and size a process of its own converts the set into arrays, takes the digest, and
reads it in batches. Peak memory is what the process holds that no file backs (RssAnon): pages of
mapped files are given back whenever somebody needs the memory.
"""

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROW = (3, 64, 64)
FORMS = ("folder of .npy", "Parquet", "Hugging Face dataset", "image folder", "Python function")
_SIZES_MIB = (256, 1024)
_ROWS_AT_A_TIME = 512
_SAMPLED_EVERY_S = 0.002


def make(form: str, rows: int, folder: Path) -> str:
    """A set of random images, written some rows at a time; how a policy names it."""
    rng = np.random.default_rng(0)
    starts = range(0, rows, _ROWS_AT_A_TIME)
    blocks = (rng.random((min(_ROWS_AT_A_TIME, rows - at), *ROW), np.float32) for at in starts)
    if form == "folder of .npy":
        (folder / "arrays").mkdir()
        place = folder / "arrays" / "input.x.npy"
        whole = np.lib.format.open_memmap(place, "w+", np.float32, (rows, *ROW))
        for at, block in zip(starts, blocks, strict=True):
            whole[at : at + len(block)] = block
        return "arrays"
    if form == "Parquet":
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        kind = pa.fixed_shape_tensor(pa.float32(), ROW)
        # One row group, the hardest case: its columns cannot be read whole.
        with pq.ParquetWriter(folder / "set.parquet", pa.schema([("input.x", kind)])) as writer:
            for block in blocks:
                tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(block)
                writer.write_batch(pa.record_batch([tensors], ["input.x"]), row_group_size=rows)
        return "set.parquet"
    if form == "Hugging Face dataset":
        import datasets  # noqa: PLC0415

        datasets.disable_progress_bars()
        kinds = datasets.Features({"input.x": datasets.Array3D(ROW, "float32")})
        made = datasets.Dataset.from_generator(
            _random_rows,
            gen_kwargs={"rows": rows},
            features=kinds,
            cache_dir=str(folder / "cache"),
            writer_batch_size=_ROWS_AT_A_TIME,
        )
        made.save_to_disk(str(folder / "hf"))
        return "hf"
    if form == "image folder":
        from PIL import Image  # noqa: PLC0415

        for number in range(rows):
            place = folder / "images" / str(number % 10) / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (*ROW[1:], 3), np.uint8)
            Image.fromarray(pixels).save(place, compress_level=1)
        return "images"
    (folder / "set_of_benchmark.py").write_text(
        "import numpy as np\n"
        "def samples():\n"
        "    rng = np.random.default_rng(0)\n"
        f"    for at in range(0, {rows}, {_ROWS_AT_A_TIME}):\n"
        f"        count = min({_ROWS_AT_A_TIME}, {rows} - at)\n"
        f"        yield {{'input.x': rng.random((count, *{ROW}), np.float32)}}\n"
    )
    return "python:set_of_benchmark:samples"


def _random_rows(rows: int) -> Iterator[dict[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(0)
    for _ in range(rows):
        yield {"input.x": rng.random(ROW, np.float32)}


def read(written: str, root: Path) -> None:
    """Convert, digest and batch one set; print seconds and the peak of memory above the start's."""
    from enginegate.data_sources import load_data  # noqa: PLC0415
    from enginegate.policy.data import Data  # noqa: PLC0415

    if "parquet" in written:
        import pyarrow.parquet  # noqa: F401, PLC0415
    if written == "hf":
        import datasets  # noqa: F401, PLC0415
    table = {"evaluation": written, "allow_code": True}
    source = Data.model_validate(table, context={"root": root}).evaluation
    seconds, peak_mib = peak_of(lambda: load_data(source))
    data = load_data(source)
    again, later_mib = peak_of(lambda: (data.sha256, *map(len, data.batches(64))))
    print(f"{seconds:.2f} {peak_mib:.0f} {again:.2f} {later_mib:.0f}")


def peak_of(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and MiB that no file backs at the most, above those at the start."""
    start, peak, ended = _anonymous_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(_SAMPLED_EVERY_S):
            peak = max(peak, _anonymous_mib())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    work()
    seconds = time.monotonic() - began
    ended.set()
    watching.join()
    return seconds, max(peak, _anonymous_mib()) - start


def _anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def main() -> None:
    """One row for each form and size."""
    if sys.argv[1:2] == ["--read"]:
        read(sys.argv[2], Path(sys.argv[3]))
        return
    sizes = tuple(map(int, sys.argv[1:])) or _SIZES_MIB
    print("| form | arrays, MiB | convert, s | peak, MiB | digest and batches, s | peak, MiB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for form in FORMS:
        for size in sizes:
            rows = size * (1 << 20) // (4 * int(np.prod(ROW)))
            with tempfile.TemporaryDirectory(prefix="enginegate-data-") as scratch:
                written = make(form, rows, Path(scratch))
                done = subprocess.run(  # noqa: S603 - this file
                    [sys.executable, __file__, "--read", written, scratch],
                    capture_output=True,
                    text=True,
                    check=True,
                )
            cells = done.stdout.split()
            print(f"| {form} | {size} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
