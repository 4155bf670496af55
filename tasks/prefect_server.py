"""The way to Prefect's server for what can wait until the next run: asked once, for seconds.

Inside a flow Prefect hands out the engine's client, which waits for minutes and asks again. The
result of a rollback, or a check of what is live, must not wait with it.

Where no server is named, Prefect starts one of its own. It must not outlive this process, nor hold
the pipe that this process writes to: a CI step ends when that is closed.
"""

import os
import subprocess
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from uuid import UUID

from httpx import HTTPError, HTTPStatusError, InvalidURL, ReadTimeout, Response, TransportError
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from enginegate.errors import EnginegateError
from enginegate.redact import log_if_slow, masked, masked_error
from enginegate.triton.supervised_process import watchdog_command
from enginegate.workspace import Workspace

# It cannot be reached, refuses, or answers in words that are not Prefect's.
REFUSALS = (HTTPError, InvalidURL, PrefectException, OSError, TypeError, ValueError)

_ANSWER_S = 5.0
# A flow needs the server, so that its first answer may take longer.
_FIRST_ANSWER_S = 15.0
_SAID_AFTER_S = 3.0
# Prefect's transport connects four times by itself.
_CONNECT_S = 1.0
_ASK_AGAIN = frozenset({408, 429})
# Prefect's server gives no more at once.
_PAGE = 200
# A server that is asked to stop; Prefect itself waits for five seconds.
_GRACE_S = 4.0


def may_pass(error: Exception) -> bool:
    """Whether a server that answered this, or nothing, may answer well when it is asked again.

    It says 500 while its database restarts.
    """
    if isinstance(error, HTTPStatusError):
        return error.response.is_server_error
    return isinstance(error, TransportError | OSError)


def flow_runs(
    client: SyncPrefectClient, wanted: FlowRunFilter, *, flows: FlowFilter | None = None
) -> Iterator[FlowRun]:
    """Every run that the filter takes, page after page.

    Each page is asked for without the runs of those before: counted from the beginning, a run that
    ends meanwhile would hide another.
    """
    seen: list[UUID] = []
    while True:
        others = FlowRunFilterId(not_any_=seen) if seen else None
        page = client.read_flow_runs(
            flow_filter=flows,
            flow_run_filter=wanted.model_copy(update={"id": others}),
            limit=_PAGE,
        )
        yield from page
        if len(page) < _PAGE:
            return
        seen += (run.id for run in page)


def check_prefect_answers() -> None:
    """Return if Prefect's server answers, whatever it says; one inside this process is not asked.

    By itself Prefect's client waits for minutes, without a word.

    Raises:
        EnginegateError: nothing accepts a connection there, or nothing answers within seconds.
    """
    server = masked(PREFECT_API_URL.value() or "")
    if not server:
        return
    waiting = f"waiting for Prefect's server at {server}; given up after {_FIRST_ANSWER_S:g} s"
    try:
        with (
            log_if_slow(waiting, after_s=_SAID_AFTER_S),
            quick_client(_FIRST_ANSWER_S) as client,
        ):
            client.request("GET", "/health")
    except (HTTPStatusError, PrefectException):
        return  # an answer; what it means is Prefect's to say
    except REFUSALS as error:
        silent = isinstance(error, ReadTimeout)
        why = f"no answer in {_FIRST_ANSWER_S:g} s" if silent else masked(str(error))
        raise EnginegateError(
            f"Prefect's server at {server} does not answer: {why}. See whether it runs, name "
            "another with PREFECT_API_URL, or unset that: then Prefect runs inside this process."
        ) from masked_error(error)


@contextmanager
def quick_client(answer_s: float | None = None) -> Iterator[SyncPrefectClient]:
    """A client of its own: what it asks is answered within seconds, or is one of `REFUSALS`."""
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(httpx_settings=_asked_once(answer_s), sync_client=True) as client,
    ):
        yield client


@dataclass(slots=True)
class HeldClient:
    """A quick client that stays open between questions: opening one takes a tenth of a second.

    Attributes:
        answer_s: how long it waits for an answer.
    """

    answer_s: float
    _client: SyncPrefectClient | None = field(default=None, init=False)

    @contextmanager
    def asking(self) -> Iterator[SyncPrefectClient]:
        """The client, for a block; what goes wrong there is one of `REFUSALS`, and closes it."""
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            try:
                if self._client is None:
                    made = get_client(httpx_settings=_asked_once(self.answer_s), sync_client=True)
                    self._client = made.__enter__()
                yield self._client
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the connection; the next question opens another."""
        if self._client is not None:
            self._client.__exit__(None, None, None)
        self._client = None


def _asked_once(answer_s: float | None) -> dict[str, Any]:
    answer_s = answer_s or _ANSWER_S
    return {
        "timeout": (_CONNECT_S, answer_s, answer_s, answer_s),
        "event_hooks": {"response": [_refuse]},
    }


def _refuse(response: Response) -> None:
    """Without retries too, Prefect would first wait for as long as such an answer asks it to."""
    if response.is_server_error or response.status_code in _ASK_AGAIN:
        response.raise_for_status()


def guard_own_server() -> None:
    """Let a server that Prefect starts by itself end with this process, however this one ends."""
    if PREFECT_API_URL.value():
        return
    # It takes most of a second to import, and only a server of our own needs it.
    from prefect.server.api import server  # noqa: PLC0415

    # Prefect has no setting for how it starts its server; it calls `subprocess.Popen` there.
    server.subprocess = _Guarding("subprocess")  # type: ignore[attr-defined]


class _Guarding(ModuleType):
    """The module `subprocess`, except that what it starts runs under our guard."""

    @staticmethod
    def Popen(args: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":  # noqa: N802
        log = Workspace.here().logs / "prefect-server.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        theirs, ours = os.pipe()
        with os.fdopen(theirs), ExitStack() as failed:
            failed.callback(os.close, ours)
            process = subprocess.Popen(  # noqa: S603
                watchdog_command(args, log=log, grace_s=_GRACE_S),
                env=env,
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C is ours to handle: Prefect still has to write down what became of the run.
                start_new_session=True,
            )
            failed.pop_all()
        # The guard ends when our end is closed: with Prefect's handle, or with this process.
        weakref.finalize(process, os.close, ours)
        return process

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)
