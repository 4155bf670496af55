"""How much of an archive may be unpacked: a small file can hold more than this machine.

The limit is what is free in memory now, and an archive that expands as no honest data does is
refused from a gibibyte on. ENGINEGATE_MAX_ARCHIVE_GIB sets another limit, instead of both.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

from enginegate.errors import InputError
from enginegate.machine import free_memory

LIMIT_VARIABLE = "ENGINEGATE_MAX_ARCHIVE_GIB"
_GIB = 1 << 30
# Compressed masks and zeros reach a hundred; a file made to expand reaches a thousand.
_MOST_TIMES = 200
_ENCRYPTED = 1
_KINDS = {ZIP_STORED, ZIP_DEFLATED}


def objections(path: Path, archive: ZipFile, *, endings: Collection[str] = ()) -> Iterator[str]:
    """Why an archive is not unpacked, each reason as a sentence; nothing of it is unpacked here.

    Args:
        path: the archive's file.
        endings: what every member's name ends with; empty: any name.

    Raises:
        InputError: ENGINEGATE_MAX_ARCHIVE_GIB is not a positive number.
    """
    members = [member for member in archive.infolist() if not member.is_dir()]
    for member in members:
        if member.flag_bits & _ENCRYPTED:
            yield f"its member {member.filename!r:.80} is encrypted; write the file again without."
        elif member.compress_type not in _KINDS:
            yield (
                f"its member {member.filename!r:.80} is compressed by method "
                f"{member.compress_type}; write it uncompressed or deflated."
            )
        elif endings and not member.filename.endswith(tuple(endings)):
            yield (
                f"its member {member.filename!r:.80} does not belong there: each is called "
                f"NAME{' or NAME'.join(endings)}. Take it out."
            )
    yield from _too_large(path, members)


def _too_large(path: Path, members: Collection[ZipInfo]) -> Iterator[str]:
    total, packed = sum(member.file_size for member in members), max(1, path.stat().st_size)
    limit, free = _limit(), free_memory()
    way_out = (
        "Arrays in a folder of .npy files are not read into memory; or, if you trust the file and "
        f"there is room, set {LIMIT_VARIABLE} to the gibibytes that it may take."
    )
    if limit is not None:
        if total > limit:
            yield (
                f"it unpacks to {total / _GIB:.1f} GiB, and {LIMIT_VARIABLE} allows "
                f"{limit / _GIB:g}. {way_out}"
            )
    elif free is not None and total > free:
        yield (
            f"it unpacks to {total / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB of memory are free. "
            f"{way_out}"
        )
    elif total > _GIB and total > _MOST_TIMES * packed:
        yield (
            f"it unpacks to {total / _GIB:.1f} GiB, {total // packed} times its size; more than "
            f"{_MOST_TIMES} times is no data. {way_out}"
        )


def _limit() -> float | None:
    text = os.environ.get(LIMIT_VARIABLE)
    if not text:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0.0:
        raise InputError(f"{LIMIT_VARIABLE} is {text!r}; it must be a number of GiB above 0.")
    return limit * _GIB
