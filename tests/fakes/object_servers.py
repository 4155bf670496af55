"""Real server programs that speak the providers' protocols: moto's S3, and Microsoft's Azurite."""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from pathlib import Path

AZURITE = (
    Path(__file__).parents[2] / "requirements/node_modules/azurite/dist/src/blob/main.js"
).absolute()
# The account that every Azurite has; Microsoft's documentation prints its key.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_STARTS_S = 60.0


def azurite_is_missing() -> str:
    """Why Azurite cannot be run here; empty if it can."""
    if shutil.which("node") is None:
        return "Node.js is not on PATH, and Azurite needs it"
    return "" if AZURITE.is_file() else f"{AZURITE} not found: apt-get install npm, then make npm"


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """Run Azurite in memory; its address (http://HOST:PORT)."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--silent", "--disableTelemetry", "--inMemoryPersistence")
    with (folder / "azurite.log").open("wb") as log:
        running = subprocess.Popen(
            ["node", AZURITE, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)],
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + _STARTS_S
        while not _answers(port):
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "azurite.log").read_text() or "no answer")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(10)


def make_container(address: str, name: str) -> None:
    """Make a container, unless there is one, by a request signed with the account's key."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = (
        f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n"
        f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    key = base64.b64decode(ACCOUNT_KEY)
    signature = base64.b64encode(hmac.new(key, signed.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(  # noqa: S310 - of 127.0.0.1
        f"{address}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{signature}",
        },
    )
    with suppress(urllib.request.HTTPError):
        urllib.request.urlopen(request, timeout=30).close()  # noqa: S310


def azure_settings(address: str) -> dict[str, str]:
    """What a user sets to reach it."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        "AZURE_STORAGE_ENDPOINT": f"{address}/{ACCOUNT}",
    }


def s3_settings(address: str) -> dict[str, str]:
    """What a user sets to reach it, and nothing of this machine's."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "not-to-be-seen",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
