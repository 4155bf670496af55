"""`call`: labelled samples to the live model, its answers beside the labels, and how to ask it."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from enginegate.cli.output.client_lines import ClientRequest
from enginegate.cli.output.json_output import JsonFlag, printing
from enginegate.cli.output.records import AnsweredOutput, AnsweredSample, CallDocument
from enginegate.cli.policies import policies_here
from enginegate.data import Array, DataSet
from enginegate.data_sources import load_data
from enginegate.errors import EnginegateError, InputError, RepositoryError, ServerError
from enginegate.messages import counted, short_number
from enginegate.policy import Policy, read_policy
from enginegate.report.tables import print_hanging
from enginegate.repository import Layout
from enginegate.triton.client import TritonClient
from enginegate.triton.endpoint import LiveAddresses, live_addresses
from enginegate.workspace import Workspace

_ANSWER_S = 30.0
_MOST_SHOWN = 8  # numbers of an output on the terminal
_MOST_KEPT = 1000  # numbers of an output in the document
_HTTP_PORT = 8000  # Triton's own, where only the gRPC address is known


def call_command(
    model: Annotated[
        str, typer.Argument(help="a policy file, or the name of a model of policies/")
    ],
    sample: Annotated[
        list[int] | None,
        typer.Option(min=0, metavar="N", help="which sample, from 0; may repeat; default: 0"),
    ] = None,
    *,
    as_json: JsonFlag = False,
) -> None:
    """Send labelled samples to the live model; show answers, labels, and lines to ask it yourself.

    The samples are the policy's evaluation data. An answer that differs from its label is no error:
    what the model may get wrong was judged when it was qualified.
    """
    with printing(as_json=as_json) as output:
        found = call_live(_policy_named(model), sample or [0])
        _print_call(found, output.console)
        output.document(found)


def call_live(policy: Policy, numbers: Sequence[int]) -> CallDocument:
    """Send samples of the policy's evaluation data to what is live, one request each.

    Args:
        policy: whose model is live.
        numbers: positions in the data, from 0.

    Raises:
        InputError: there is no such sample.
        RepositoryError: nothing is live.
        ServerError: no server is known, or it did not answer.
        DataError: the data cannot be read, or does not fit the live model.
    """
    layout = Layout(policy.target.repository, policy.name)
    current = layout.current()
    if current is None:
        raise RepositoryError(
            f"Nothing of {policy.name} is live in {layout.root}, so nothing answers. Promote a "
            "scorecard first: `enginegate status` says what waits."
        )
    addresses = live_addresses(policy.target)
    if addresses is None:
        raise ServerError(
            f"No server of {layout.root} is known. Start one with `enginegate serve`, or name "
            "yours in the policy: target.endpoint."
        )
    of_ensemble = policy.ensemble.samples if policy.ensemble else None
    data = load_data(of_ensemble or policy.data.evaluation)
    beyond = [number for number in numbers if number >= len(data)]
    if beyond:
        raise InputError(
            f"--sample {beyond[0]}: {data.origin} holds {counted(len(data), 'sample')}, 0 to "
            f"{len(data) - 1}."
        )
    specs = layout.release(current.version).inputs
    rows = {number: data.rows(number, number + 1).in_types(specs) for number in numbers}
    with TritonClient(addresses.grpc, timeout_s=_ANSWER_S) as client:
        answered = tuple(_answered(client, policy, n, row) for n, row in rows.items())
    first, row = next(iter(rows.items()))
    folder = Workspace.of(policy).scratch / "calls"
    request = ClientRequest(policy.name, dict(row.inputs), folder, f"{policy.name}-{first}")
    return CallDocument(
        model=policy.name,
        release=current.version,
        server=addresses.grpc,
        data=data.origin,
        samples=answered,
        python=request.python(addresses.grpc),
        curl=request.curl(_url(addresses)),
        http_is_known=addresses.http is not None,
    )


def _policy_named(model: str) -> Policy:
    """The policy of a file, else the one in ``policies/`` that is of a model of that name.

    Raises:
        InputError: there is neither.
    """
    path = Path(model)
    if path.suffix == ".toml" or path.is_file():
        return read_policy(path)
    names = []
    for each in policies_here():
        try:
            policy = read_policy(each)
        except EnginegateError:
            continue
        if policy.name == model:
            return policy
        names.append(policy.name)
    there = f"there are {', '.join(names)}" if names else "there is none"
    raise InputError(
        f"No policy here is of a model {model!r}; {there}. Name its policy file instead."
    )


def _answered(client: TritonClient, policy: Policy, number: int, row: DataSet) -> AnsweredSample:
    started = time.perf_counter()
    reply = client.infer(policy.name, dict(row.inputs))
    took_ms = 1e3 * (time.perf_counter() - started)
    outputs, first = [], policy.outputs or reply.outputs
    for name, array in reply.outputs.items():
        label = row.targets.get(name)
        if label is None and name == next(iter(first)):
            label = row.targets.get("", row.labels)
        outputs.append(_output(name, array, None if label is None else label[0], policy))
    return AnsweredSample(
        sample=number,
        id=str(row.ids[0]),
        answered_by=reply.model_version,
        took_ms=round(took_ms, 3),
        outputs=tuple(outputs),
    )


def _output(name: str, array: Array, label: Array | None, policy: Policy) -> AnsweredOutput:
    """One output; as a class where that is what it means, else as numbers beside the label's."""
    known = not policy.outputs or name in policy.outputs
    classes = known and policy.output_task(name) == "classification"
    best = int(np.argmax(array[0])) if classes and array.ndim > 1 and array[0].ndim == 1 else None
    single = label is not None and np.ndim(label) == 0
    return AnsweredOutput(
        name=name,
        dtype=array.dtype.name,
        shape=array.shape,
        values=_plain(array.reshape(-1)[:_MOST_KEPT]),
        answer=best,
        label=() if label is None else _plain(np.asarray(label).reshape(-1)[:_MOST_KEPT]),
        agrees=bool(best == label) if best is not None and single else None,
    )


def _plain(values: Array) -> tuple[float | int | str, ...]:
    """Numbers and texts as JSON has them; it has no NaN, no infinity and no bytes."""

    def plain(value: object) -> float | int | str:
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if isinstance(value, float) and np.isfinite(value):
            return value
        return int(value) if isinstance(value, int) else str(value)

    return tuple(plain(value) for value in values.tolist())


def _url(addresses: LiveAddresses) -> str:
    if addresses.http is not None:
        return f"http://{addresses.http}"
    host = urlsplit(f"//{addresses.grpc}").hostname or addresses.grpc
    return f"http://{f'[{host}]' if ':' in host else host}:{_HTTP_PORT}"


def _print_call(found: CallDocument, out: Console) -> None:
    for sample in found.samples:
        print_hanging(
            out,
            f"Sample {sample.sample} ({sample.id}) of {found.data}: release {sample.answered_by} "
            f"of {found.model} answered in {short_number(sample.took_ms)} ms.",
        )
        for output in sample.outputs:
            for name, text in _rows(output):
                print_hanging(out, text, Text(f"  {name:<7}  ", style="dim"))
    out.print()
    print_hanging(out, "In Python (pip install 'tritonclient[grpc]'):")
    out.print(Text(found.python), soft_wrap=True)
    out.print()
    if not found.curl:
        print_hanging(out, "With curl: Triton's JSON has no type of one of the inputs.")
        return
    usual = "" if found.http_is_known else f" (HTTP port {_HTTP_PORT} is Triton's usual one)"
    print_hanging(out, f"With curl{usual}:")
    out.print(Text(found.curl), soft_wrap=True)


def _rows(output: AnsweredOutput) -> Iterator[tuple[str, str]]:
    """What the terminal shows of one output: answer and label below each other."""
    size = " x ".join(map(str, output.shape))
    values = _shown(output.values)
    if output.answer is not None:
        yield "answer", f"{output.answer}   ({output.name}, {size}: {values})"
    else:
        yield "answer", f"{values}   ({output.name}, {size})"
    if output.label:
        agrees = {True: "   agrees", False: "   differs", None: ""}[output.agrees]
        yield "label", f"{_shown(output.label)}{agrees}"


def _shown(values: Sequence[float | int | str]) -> str:
    shown = ", ".join(
        f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:_MOST_SHOWN]
    )
    return f"{shown}, …" if len(values) > _MOST_SHOWN else shown
