"""The lock of a live repository: one change at a time, whichever process makes it."""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from enginegate.atomic_io import NotRegularFileError, file_lock
from enginegate.errors import NotWritableError, RepositoryBusyError, RepositoryError

LOCK = ".enginegate.lock"
LOCK_TIMEOUT_S = 30.0  # longer than any change but a load, which holds it for as long as it takes
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@contextmanager
def hold_lock(root: Path, *, timeout_s: float | None = None) -> Iterator[None]:
    """Hold a repository's lock; the folder is made if it is not there.

    Raises:
        RepositoryBusyError: somebody else held it for all of ``timeout_s``.
        NotWritableError: the folder may not be written to.
        RepositoryError: the folder cannot be made, or its lock is no regular file.
    """
    with ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            limit_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
            stack.enter_context(file_lock(root / LOCK, timeout_s=limit_s))
        except TimeoutError as error:
            raise RepositoryBusyError(
                f"{root} is being changed by {error}. Try again when it has finished."
            ) from error
        except NotRegularFileError as error:
            raise RepositoryError(f"{error.strerror}.") from error
        except OSError as error:
            kind = NotWritableError if error.errno in _READ_ONLY else RepositoryError
            raise kind(
                f"The live repository {root} cannot be changed: {error.strerror}. Make it a folder "
                "that you may write to, or name another one under [target] in the policy."
            ) from error
        yield
