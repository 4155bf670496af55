"""The address of a model that a person named by a path, and what its inputs are before it runs."""

from pathlib import Path

from enginegate.candidate import TensorSpec
from enginegate.errors import ModelError
from enginegate.policy.model_source import FORMS, ModelSource
from enginegate.sources.inspection import program_inputs
from enginegate.sources.onnx_form import input_specs, read_onnx

_SCHEMES = ("models:/", "runs:/", "file:", "hf:", "python:")
_SAVE = {
    "sklearn": "Log it in MLflow, and name the version:\n"
    "  mlflow.sklearn.log_model(model, name='model', serialization_format='skops', "
    "registered_model_name='NAME')\n"
    "  enginegate init models:/NAME/1 --data FILE",
    "torch": "Save the program instead of weights or a pickle:\n"
    "  batch = torch.export.Dim('batch', max=1024)\n"
    "  program = torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))\n"
    "  torch.export.save(program, 'model.pt2')  # example: two rows or more",
    "weights": "Weights alone are no model: name the folder that save_pretrained wrote (with "
    "config.json), or save a program with torch.export.save(program, 'model.pt2').",
    "keras": "Convert it to ONNX (tf2onnx, or keras' model.export(..., format='onnx')), and name "
    "that file.",
}
_ENDINGS = {
    **dict.fromkeys((".pkl", ".pickle", ".joblib", ".skops"), "sklearn"),
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch"),
    ".safetensors": "weights",
    **dict.fromkeys((".h5", ".keras", ".pb"), "keras"),
}
# Of any encoder; a model that takes two of them leaves out the last.
_TOKENS = tuple(
    TensorSpec(name=name, dtype="int64", shape=(-1, -1))
    for name in ("input_ids", "attention_mask", "token_type_ids")
)


def model_uri(given: str, folder: Path) -> str:
    """The address of a model that a person named in their own words.

    Args:
        given: an address as policies have it, a path, or MODULE:FUNCTION.
        folder: where relative paths start.

    Raises:
        ModelError: it is none of them, or a file that cannot be opened safely; says how to save
            that model instead.
    """
    if given.startswith(_SCHEMES):
        scheme, _, location = given.partition(":")
        return f"{scheme}:{folder / location}" if scheme in {"file", "hf"} else given
    path = folder / given
    if path.is_dir() and (path / "config.json").is_file():
        return f"hf:{path}"
    if path.is_dir() and (path / "MLmodel").is_file():
        raise ModelError(
            f"{given} is a model as MLflow saves it. Register it, and name the version:\n"
            f"  python -c \"import mlflow; mlflow.register_model('file://{path}', 'NAME')\"\n"
            "  enginegate init models:/NAME/1 --data FILE"
        )
    if path.is_file() and path.suffix in {".onnx", ".pt2"}:
        return f"file:{path}"
    if path.is_file():
        raise ModelError(f"{given} is not a form that opens without running code. {_instead(path)}")
    module, colon, function = given.partition(":")
    if colon and function.isidentifier() and all(p.isidentifier() for p in module.split(".")):
        return f"python:{given}"
    raise ModelError(f"There is no model {given}. Name a file or folder, or one of {FORMS}.")


def expected_inputs(source: ModelSource) -> tuple[TensorSpec, ...]:
    """The inputs of a model that is not opened yet, where its file says them; else none.

    Raises:
        ModelError: an ONNX file cannot be read.
    """
    if source.scheme == "hf":
        return _TOKENS
    if source.scheme != "file" or not source.path.is_file():
        return ()
    if source.path.suffix == ".onnx":
        return input_specs(read_onnx(source.path, origin=source.uri, limit=0))
    return program_inputs(source.path)


def _instead(path: Path) -> str:
    kind = _ENDINGS.get(path.suffix.lower())
    return _SAVE[kind] if kind else f"Name one of {FORMS}."
