"""The way to Prefect's server for what can wait until the next run: asked once, for seconds.

Inside a flow Prefect hands out the engine's client, which waits for minutes and asks again. The
result of a rollback, or a look at what is live, must not wait with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from httpx import HTTPError, InvalidURL, Response
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

# It cannot be reached, refuses, or answers in words that are not Prefect's.
REFUSALS = (HTTPError, InvalidURL, PrefectException, OSError, TypeError, ValueError)

_ANSWER_S = 5.0
# Prefect's transport connects four times by itself.
_CONNECT_S = 1.0
_ASK_AGAIN = frozenset({408, 429})


@contextmanager
def quick_client() -> Iterator[SyncPrefectClient]:
    """A client of its own: what it asks is answered within seconds, or is one of `REFUSALS`."""
    asked_once = {
        "timeout": (_CONNECT_S, _ANSWER_S, _ANSWER_S, _ANSWER_S),
        "event_hooks": {"response": [_refuse]},
    }
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings=asked_once, sync_client=True) as client,
    ):
        yield client


def _refuse(response: Response) -> None:
    """Without retries too, Prefect would first wait for as long as such an answer asks it to."""
    if response.is_server_error or response.status_code in _ASK_AGAIN:
        response.raise_for_status()
