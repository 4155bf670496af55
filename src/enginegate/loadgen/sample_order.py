"""In which order samples are sent, and how many in one request."""

from collections.abc import Iterator

import numpy as np

from enginegate.errors import InputError


def shuffled(count: int, seed: int) -> Iterator[int]:
    """Indices without end: every one once in each round, shuffled anew."""
    source = np.random.default_rng(seed)
    while True:
        yield from source.permutation(count).tolist()


def batches(count: int, sizes: tuple[int, ...], seed: int) -> Iterator[list[int]]:
    """Rows of each request: whole rounds of the sizes, until every row was used.

    Args:
        count: rows there are.
        sizes: of requests, each as often as it is named.
        seed: of the sizes' order and the rows'.

    Raises:
        InputError: a size below 1, or none.
    """
    if not sizes or min(sizes) < 1:
        raise InputError(f"Batch sizes {sizes} cannot be sent: name at least one, each 1 or more.")
    if set(sizes) == {1}:
        yield from ([row] for row in range(count))
        return
    rows = shuffled(count, seed)
    used, source = 0, np.random.default_rng(seed)
    while used < count:
        for size in source.permutation(sizes).tolist():
            yield [next(rows) for _ in range(size)]
        used += sum(sizes)
