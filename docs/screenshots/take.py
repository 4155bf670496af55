# ruff: noqa: INP001, T201, S310
"""Take the pictures of docs/images: decision pages, and a promotion approved in a real browser.

The decision pages are of the example decisions that tests have too. For the promotion everything
is started in a temporary folder and stopped at the end: a copy of this checkout, an MLflow and a
Prefect server, a worker, Triton. Qualifies the digits example, starts its promotion, fills in the
form, and fails unless the release is live afterwards. Takes three or four minutes.

Needs Chromium with its driver (Debian: ``apt-get install chromium chromium-driver``):

    make screenshots
    make screenshots ARGS=--pages    # only the decision pages, in seconds
"""

import argparse
import json
import tempfile
import urllib.request
from pathlib import Path

from docs.screenshots.camera import camera
from docs.screenshots.mlflow_pages import take_comparison, take_registry
from docs.screenshots.pages import take_pages
from docs.screenshots.prefect_pages import take_approval, take_qualification, take_watch
from docs.screenshots.stand import (
    CHECKOUT,
    POLICY,
    Stand,
    new_stand,
    newest_run,
    promotion,
    qualify,
    started,
)
from docs.screenshots.waiting import WAIT_S

_IMAGES = CHECKOUT / "docs" / "images"


def main() -> None:
    """Set everything up, take the pictures, check what is live."""
    options = _options()
    options.images.mkdir(exist_ok=True)
    with camera(options.images) as shown:
        take_pages(shown)
    if options.pages:
        return
    with tempfile.TemporaryDirectory(prefix="enginegate-") as folder:
        stand = new_stand(Path(folder), options.commands, options.home)
        print(f"setting up in {folder}")
        with started(stand):
            print("training, qualifying: about two minutes")
            digest = qualify(stand)
            with camera(options.images) as shown:
                qualified = newest_run(stand, "qualify")
                take_qualification(stand, shown, qualified)
                take_comparison(stand, shown, qualified)
                take_approval(stand, shown, promotion(stand, digest))
                take_watch(stand, shown, POLICY)
                take_registry(stand, shown)
            _check_live(stand)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", type=Path, help="a workspace whose engines and measurements are taken over"
    )
    parser.add_argument(
        "--commands",
        type=Path,
        default=CHECKOUT / ".venv" / "bin",
        help="the folder of enginegate, prefect and mlflow",
    )
    parser.add_argument("--pages", action="store_true", help="only of decision pages")
    parser.add_argument("--images", type=Path, default=_IMAGES, help="where pictures go")
    return parser.parse_args()


def _check_live(stand: Stand) -> None:
    """Every digest, what the server serves, who said so, and MLflow's alias; else the exit code."""
    stand.run("enginegate", "verify", POLICY)
    status = stand.run("enginegate", "status", POLICY)
    log = stand.run("enginegate", "audit", POLICY, "--json")
    alias = f"{stand.mlflow}/api/2.0/mlflow/registered-models/alias?name=digits&alias=champion"
    with urllib.request.urlopen(alias, timeout=WAIT_S) as reply:
        champion = json.loads(reply.read())["model_version"]["version"]
    said = [(event["event"], event["who"]) for event in map(json.loads, log.splitlines())]
    if "live: release 1," not in status or champion != "1" or ("approved", "ada") not in said:
        raise SystemExit(f"Not live, or not as approved: champion {champion}, {said}\n{status}")
    print("release 1 is live as ada approved it, and verifies")


if __name__ == "__main__":
    main()
