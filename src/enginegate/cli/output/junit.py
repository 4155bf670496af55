"""Findings as JUnit XML, which CI systems show beside a build's tests.

A candidate, or a check of what is live, is a suite, and each of its findings a test case: passed;
failed, a failure; errored, an error; inconclusive or only advisory, skipped. Times are left out: a
finding takes none.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import typer

from enginegate.atomic_io import write_file
from enginegate.cli.output.scorecard_document import qualification_outcome
from enginegate.errors import InputError
from enginegate.evidence import Finding, Outcome, Scorecard
from enginegate.report import candidate_meaning
from enginegate.watch.log import WatchCheck

JunitFile = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="write the findings as JUnit XML, for CI systems"),
]

# A document that holds one of these characters, escaped or not, is no XML 1.0.
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGS = {Outcome.FAILED: "failure", Outcome.ERRORED: "error", Outcome.INCONCLUSIVE: "skipped"}
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class _Suite:
    """One suite.

    Attributes:
        name: of the candidate or the check.
        about: the model, which test cases are grouped by.
        findings: in their order.
        at: when they were made.
        properties: what else identifies them.
    """

    name: str
    about: str
    findings: tuple[Finding, ...]
    at: datetime | None = None
    properties: Mapping[str, str] = field(default_factory=dict)


def write_scorecard_junit(card: Scorecard, path: Path | None) -> None:
    """Write a scorecard's findings: first whether there is a winner, then each candidate's.

    Args:
        path: the file, which is replaced; None: none was asked for.

    Raises:
        InputError: the file cannot be written.
    """
    if path is not None:
        _write(path, f"enginegate qualify {card.model}", _suites(card))


def write_watch_junit(
    checks: Iterable[WatchCheck], path: Path | None, *, model: str, ended: Finding | None = None
) -> None:
    """Write the findings of checks of what is live.

    Args:
        checks: none: nothing is live, which is shown as skipped.
        path: the file, which is replaced; None: none was asked for.
        ended: why the run failed as a whole, e.g. for a promise broken earlier; None: it did not.

    Raises:
        InputError: the file cannot be written.
    """
    if path is None:
        return
    suites = [
        _Suite(
            f"check {check.number} of release {check.version}",
            check.model,
            check.findings,
            check.at,
            {"release": str(check.version), "action": check.action},
        )
        for check in checks
    ]
    if ended is not None:
        suites.insert(0, _Suite("watch", model, (ended,)))
    _write(path, f"enginegate watch {model}", suites or [_Suite("nothing live", model, ())])


def _suites(card: Scorecard) -> list[_Suite]:
    known = {
        "scorecard": card.digest,
        "model": card.model_uri,
        "policy_sha256": card.policy_sha256,
        "winner": card.winner.name if card.winner else "",
    }
    ended = qualification_outcome(card)
    winner = Finding(gate="winner", scope="scorecard", outcome=ended, reason=card.reason)
    suites = [_Suite("scorecard", card.model, (winner,), card.created_at, known)]
    for verdict in card.verdicts:
        measured = card.benchmark(verdict.candidate)
        findings = (*verdict.findings, *(measured.findings if measured else ()))
        properties = {
            "scorecard": card.digest,
            "engine_sha256": verdict.engine_sha256 or "",
            "outcome": card.outcome(verdict.candidate).word,
            "meaning": candidate_meaning(card, verdict.candidate),
        }
        suites.append(
            _Suite(verdict.candidate.name, card.model, findings, card.created_at, properties)
        )
    return suites


def _write(path: Path, name: str, suites: Iterable[_Suite]) -> None:
    root = Element("testsuites", name=_text(name))
    for suite in suites:
        _add(root, suite)
    _count(root)
    indent(root)
    try:
        write_file(path, tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}. Name another file with --junit."
        ) from error


def _add(root: Element, suite: _Suite) -> None:
    element = SubElement(root, "testsuite", name=_text(suite.name))
    if suite.at is not None:
        element.set("timestamp", f"{suite.at:%Y-%m-%dT%H:%M:%S}")
    if suite.properties:
        listed = SubElement(element, "properties")
        for name, value in suite.properties.items():
            SubElement(listed, "property", name=name, value=_text(value))
    for finding in suite.findings:
        _add_case(element, suite, finding)
    if not suite.findings:
        case = SubElement(element, "testcase", classname=_class_name(suite), name="evidence")
        SubElement(case, "skipped", message="There is no evidence, so nothing was decided.")
    _count(element)


def _add_case(element: Element, suite: _Suite, finding: Finding) -> None:
    case = SubElement(
        element,
        "testcase",
        classname=_class_name(suite),
        name=_text(f"{finding.gate} ({finding.scope})"),
    )
    if finding.outcome is Outcome.PASSED:
        SubElement(case, "system-out").text = _text(finding.reason)
        return
    word = finding.outcome.word
    tag, message = _TAGS[finding.outcome], finding.reason
    if finding.advisory:
        tag, message = "skipped", f"advisory, {word}: {finding.reason}"
    problem = SubElement(case, tag, message=_text(message), type=word)
    problem.text = _text("\n".join(filter(None, (finding.reason, finding.remedy))))


def _class_name(suite: _Suite) -> str:
    return _text(f"{suite.about}.{suite.name}")


def _count(element: Element) -> None:
    cases = [*element.iter("testcase")]
    element.set("tests", str(len(cases)))
    for attribute, tag in _COUNTED.items():
        element.set(attribute, str(sum(case.find(tag) is not None for case in cases)))


def _text(value: str) -> str:
    """Text that XML can hold; control characters of a model's or a server's words become �."""
    return _NO_XML.sub("�", value)
