"""The raw requests of a measurement on disk, compressed, named by their digest.

Kept so that another SLO or another percentile needs no new run.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginegate.atomic_io import write_file
from enginegate.errors import InputError, TamperedError
from enginegate.records import sha256_bytes, sha256_file


@dataclass(frozen=True, slots=True)
class RawRequests:
    """Every request of one run, in the order it was due. R requests.

    Attributes:
        due_s: when each should have left, seconds from the start, shape ``(R,)``.
        sent_s: when it left.
        latency_s: from due to answered; infinite for a failure.
        warm: whether it was sent while warming up and was answered: it is in no number but
            ``sent``.
    """

    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    warm: NDArray[np.bool_]

    @property
    def latencies_ms(self) -> NDArray[np.float64]:
        """Of the requests after the warm-up and of every failure; infinite for a failure."""
        return self.latency_s[~self.warm] * 1e3


def save_raw_requests(requests: RawRequests, folder: Path) -> str:
    """Write them once; returns the digest that names the file."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        allow_pickle=False,
        due_s=requests.due_s,
        sent_s=requests.sent_s,
        latency_s=requests.latency_s,
        warm=requests.warm,
    )
    sha256 = sha256_bytes(buffer.getvalue())
    write_file(folder / f"{sha256}.npz", buffer.getvalue())
    return sha256


def read_raw_requests(folder: Path, sha256: str) -> RawRequests:
    """The requests that were saved under that digest.

    Raises:
        InputError: there is no such file.
        TamperedError: its content is not what its name says.
    """
    path = folder / f"{sha256}.npz"
    if not path.is_file():
        raise InputError(f"The raw latencies {path} are missing: measure again.")
    if sha256_file(path) != sha256:
        raise TamperedError(f"{path} was changed after it was written: measure again.")
    with np.load(path, allow_pickle=False) as archive:
        return RawRequests(
            archive["due_s"], archive["sent_s"], archive["latency_s"], archive["warm"]
        )
