"""Kustomize's overlays as one list of objects: the small part of it that deploy/kubernetes uses."""

from copy import deepcopy
from pathlib import Path

import yaml

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
OVERLAYS = sorted(folder.name for folder in (KUBERNETES / "overlays").iterdir())
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "images", "patches"}


def rendered(folder):
    """Objects of a folder with a kustomization; what it asks for beyond the known is refused."""
    asked = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(asked) <= _KNOWN, f"{folder}: {set(asked) - _KNOWN} is not rendered here"
    objects = [each for name in asked["resources"] for each in _read((folder / name).resolve())]
    for each in objects:
        if asked.get("namespace") and each["kind"] != "Namespace":
            each["metadata"]["namespace"] = asked["namespace"]
    for image in asked.get("images", ()):
        for container in _containers(objects):
            if container["image"] == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
    for patch in asked.get("patches", ()):
        (target,) = [
            each
            for each in objects
            if each["kind"] == patch["target"]["kind"]
            and each["metadata"]["name"] == patch["target"]["name"]
        ]
        for change in yaml.safe_load(patch["patch"]):
            _change(target, change)
    return objects


def _read(path):
    if path.is_dir():
        return rendered(path)
    return [deepcopy(each) for each in yaml.safe_load_all(path.read_text())]


def _containers(objects):
    for each in objects:
        if each["kind"] == "Deployment":
            yield from each["spec"]["template"]["spec"]["containers"]


def _change(target, change):
    *way, last = [
        step.replace("~1", "/").replace("~0", "~") for step in change["path"].split("/")[1:]
    ]
    for step in way:
        target = target[int(step)] if isinstance(target, list) else target[step]
    assert change["op"] in {"add", "replace"}
    assert change["op"] == "add" or last in target, f"{change['path']} replaces nothing"
    target[last] = change["value"]
