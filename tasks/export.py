"""The model as ONNX, in the store."""

import logging
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from enginegate.candidate import OnnxModel
from enginegate.data import read_data
from enginegate.engines import open_onnx
from enginegate.policy.model_source import ModelSource
from enginegate.sources import ContentFolder, onnx_from_source
from enginegate.tracking import Tracker
from enginegate.workspace import Workspace

_log = logging.getLogger("enginegate.export")


@task(task_run_name="resolve", cache_policy=NO_CACHE)
def resolve_version(model: ModelSource, workspace: Workspace) -> str:
    """The URI of the version that an alias means now, so that everything names one version.

    Sources outside the registry have no aliases; their content is known by its digest.
    """
    if not model.registered:
        return model.uri
    return Tracker(workspace.tracking_uri, workspace.artifacts).resolve(model.uri)


@task(task_run_name="export", cache_policy=NO_CACHE)
def export(model: ModelSource, evaluation: Path, workspace: Workspace) -> ContentFolder[OnnxModel]:
    """Export once for each source, with parity and dynamic axes proved on evaluation samples."""
    _log.info("%s: to ONNX", model.uri)
    found = onnx_from_source(
        model,
        read_data(evaluation),
        onnx_root=workspace.onnx,
        tracking_uri=workspace.tracking_uri,
        open_onnx=open_onnx,
    )
    _log.info("%s: %s", model.uri, _described(found))
    return found


def _described(found: ContentFolder[OnnxModel]) -> str:
    onnx = found.value
    parity = (
        "ONNX itself, nothing to compare with"
        if onnx.parity_max_abs_error is None
        else f"differs from the framework by at most {onnx.parity_max_abs_error:.2g} on "
        f"{onnx.parity_samples} samples"
    )
    origin = "ONNX from the store" if found.reused else "exported"
    return f"{origin}, sha256 {onnx.file.sha256[:12]}, {parity}"
