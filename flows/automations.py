"""The automations that Enginegate ships -> a Prefect server, which sends messages by them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import yaml
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from pydantic import SecretStr, ValidationError

from enginegate.errors import EnginegateError, InputError
from enginegate.messages import explain_validation
from enginegate.redact import masked
from tasks.prefect_server import REFUSALS, quick_client

_OWN = Path("automations")
SHIPPED = Path(__file__).parents[1] / "automations"
BLOCK = "enginegate"


def apply_automations(webhook: str | None, folder: Path | None = None) -> tuple[str, ...]:
    """Create every automation of a folder on the Prefect server, or update the one of its name.

    Args:
        webhook: where messages are posted, as ``{"text": …}``; None: where Prefect's webhook block
            ``enginegate`` says.
        folder: with one YAML file for each automation; an action that calls a webhook gets the id
            of that block. None: ``automations/`` here, else those that are shipped.

    Returns:
        One sentence for each automation.

    Raises:
        InputError: no Prefect server is named, the address is none, a file is no automation, or
            there is no such block.
        EnginegateError: the server cannot be reached, or refuses.
    """
    server = PREFECT_API_URL.value()
    if not server:
        raise InputError(
            "No Prefect server is named, so there is none to apply automations to. Set "
            "PREFECT_API_URL, e.g. http://127.0.0.1:4200/api, and run this again."
        )
    if webhook is not None and urlsplit(webhook).scheme not in {"http", "https"}:
        raise InputError("The webhook's address must begin with http:// or https://.")
    documents = dict(_documents(folder or (_OWN if _OWN.is_dir() else SHIPPED)))
    for path, document in documents.items():
        _automation(path, document, UUID(int=0))  # every file is read before anything is changed
    try:
        with quick_client() as client:
            block = _block(client, webhook)
            made = [_automation(path, each, block) for path, each in documents.items()]
            return tuple(_apply(client, automation) for automation in made)
    except REFUSALS as error:
        raise EnginegateError(
            f"The Prefect server {masked(server)} did not take the automations: "
            f"{masked(str(error))}. What it took is updated, not doubled, when this runs again."
        ) from error


def _documents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError(f"{folder.absolute()} holds no *.yaml file of an automation.")
    for path in paths:
        try:
            document = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise InputError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(document, dict):
            raise InputError(f"{path} holds no automation: a mapping with name, trigger, actions.")
        yield path, document


def _automation(path: Path, document: dict[str, Any], block: UUID) -> AutomationCore:
    """A file's automation, whose webhooks are the block's unless the file names another."""
    actions = [
        {"block_document_id": str(block), **action}
        if isinstance(action, dict) and action.get("type") == "call-webhook"
        else action
        for action in document.get("actions", [])
    ]
    try:
        return AutomationCore.model_validate({**document, "actions": actions})
    except ValidationError as error:
        raise InputError(f"{path} is no automation:\n{explain_validation(error)}") from error


def _block(client: SyncPrefectClient, webhook: str | None) -> UUID:
    """The id of Prefect's webhook block ``enginegate``, which holds the address as a secret."""
    if webhook is not None:
        saved = Webhook(url=SecretStr(webhook)).save(BLOCK, overwrite=True)
        return UUID(str(saved))
    try:
        return client.read_block_document_by_name(BLOCK, "webhook").id
    except ObjectNotFound as error:
        raise InputError(
            f"Prefect has no webhook block named {BLOCK!r}. Give the address to post to: "
            "enginegate automations --webhook URL"
        ) from error


def _apply(client: SyncPrefectClient, automation: AutomationCore) -> str:
    there = client.read_automations_by_name(automation.name)
    if not there:
        client.create_automation(automation)
        return f"{automation.name} was created."
    client.update_automation(there[0].id, automation)
    return f"{automation.name} was updated."
