"""A folder of a Hugging Face encoder -> PyTorch program; the only door to transformers here.

Classifiers give ``logits``. Other encoders give one ``embedding`` a sample: the folder's own
pooling (``modules.json`` of sentence-transformers), else the mean over attended tokens. Inputs are
``input_ids``, ``attention_mask`` and optionally ``token_type_ids``, each ``(batch, sequence)``.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.policy.model_source import ModelSource
from enginegate.sources import pytorch
from enginegate.sources.outside import check_config, check_inside, code_named
from enginegate.sources.pytorch import Axis, Program
from enginegate.sources.types import ExportedModel, OpenedSource, digest_of

if TYPE_CHECKING:
    import torch

_OFFLINE_LOCK = threading.Lock()
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_CLASSIFIER = "ForSequenceClassification"
_ENCODER = "Model"
_MOST_BYTES = 1 << 24
_KINDS: dict[type, str] = {list: "a list", str: "text", int: "a number", float: "a number"}
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # two positions are padding


@dataclass(frozen=True, slots=True)
class _Pooling:
    """How token states become one vector."""

    first_token: bool = False
    normalised: bool = False


@dataclass(frozen=True, slots=True)
class _Folder:
    """A model folder, read as far as possible without transformers."""

    path: Path
    uri: str
    config: dict[str, Any]
    pooling: _Pooling

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["an architecture without a name"])[0])

    @property
    def classifies(self) -> bool:
        return self.architecture.endswith(_CLASSIFIER)

    @property
    def embeds(self) -> bool:
        return self.architecture.endswith(_ENCODER) and "Head" not in self.architecture

    @property
    def largest_sequence(self) -> int | None:
        largest = self.config.get("max_position_embeddings")
        offset = 2 if self.config.get("model_type") in _OFFSET_POSITIONS else 0
        return largest - offset if largest and largest > offset else None

    def files(self, *, code: bool) -> list[Path]:
        """Files that decide what the model computes; the tokenizer's do not."""
        patterns = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin")
        patterns += ("modules.json", "*_Pooling/config.json", *(("*.py",) if code else ()))
        return sorted({file for pattern in patterns for file in self.path.glob(pattern)})


def open_folder(source: ModelSource) -> OpenedSource:
    """Check the folder; transformers is imported when it is converted.

    Raises:
        ModelError: it is not a model folder, needs pickle or code that is not allowed, or is of a
            kind that cannot be served as one answer a sample.
    """
    folder = _read(source)
    _refuse_unsafe(folder, source)

    def convert(data: DataSet, scratch: Path) -> ExportedModel:
        return pytorch.onnx_from_program(_program(folder, source), data, scratch)

    return OpenedSource(
        source.uri,
        digest_of(folder.files(code=source.allow_code), folder.path),
        pytorch.exporter("transformers"),
        convert,
    )


def _read(source: ModelSource) -> _Folder:
    path = source.path
    try:
        config = _table(path / "config.json", source.uri)
        pooling = _pooling(path, source.uri)
    except OSError as error:
        raise ModelError(
            f"{source.uri} is not a model folder: {path / 'config.json'}: {error.strerror}. "
            "Models are not downloaded here; fetch one with "
            "`hf download ORGANISATION/NAME --local-dir FOLDER` and name that folder."
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{source.uri}: a JSON file is damaged: {error}. Fetch it again."
        ) from error
    _check_config(config, source.uri)
    folder = _Folder(path, source.uri, config, pooling)
    if not (folder.classifies or folder.embeds):
        raise ModelError(
            f"{source.uri} is {folder.architecture}; this program takes encoders that classify "
            f"sequences (...{_CLASSIFIER}) or embed them (...{_ENCODER})."
        )
    return folder


def _json(path: Path, uri: str) -> Any:
    """What a JSON file of a stranger's folder holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON.
        ModelError: it is larger, or nested deeper, than any description of a model.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ModelError(
            f"{uri}: {path.name} has {path.stat().st_size:,} bytes; more than {_MOST_BYTES:,} is "
            "no description of a model. Fetch it again."
        )
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ModelError(f"{uri}: {path.name} is nested too deep. Fetch it again.") from error


def _table(path: Path, uri: str) -> dict[str, Any]:
    found = _json(path, uri)
    if not isinstance(found, dict):
        raise ModelError(
            f"{uri}: {path.name} holds {_KINDS.get(type(found), 'a value')}, and must hold a "
            "table of settings. Fetch it again."
        )
    return found


def _check_config(config: dict[str, Any], uri: str) -> None:
    """Refuse settings that are read here and are of another kind than transformers writes."""
    architectures = config.get("architectures") or []
    largest = config.get("max_position_embeddings")
    wrong = ""
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        wrong = f"architectures is {architectures!r:.80}, and must be a list of names"
    elif largest is not None and (not isinstance(largest, int) or isinstance(largest, bool)):
        wrong = f"max_position_embeddings is {largest!r:.80}, and must be a whole number"
    elif not isinstance(config.get("auto_map", {}), dict):
        wrong = f"auto_map is {config['auto_map']!r:.80}, and must be a table"
    elif not isinstance(config.get("model_type", ""), str):
        wrong = f"model_type is {config['model_type']!r:.80}, and must be a name"
    if wrong:
        raise ModelError(f"{uri}: in config.json {wrong}. Fetch it again.")


def _pooling(path: Path, uri: str) -> _Pooling:
    if not (path / "modules.json").is_file():
        return _Pooling()
    modules = _json(path / "modules.json", uri)
    if not isinstance(modules, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str)
        for m in modules
    ):
        raise ModelError(
            f"{uri}: modules.json must list modules, each with its type and path. Fetch it again."
        )
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    check_inside(modules, path, uri=uri, file="modules.json")
    place = next(
        (m["path"] for m, kind in zip(modules, kinds, strict=True) if kind == "Pooling"), ""
    )
    modes = _table(path / place / "config.json", uri) if place else {}
    active = sorted(n for n, on in modes.items() if n.startswith("pooling_mode_") and on is True)
    known = [["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"], []]
    if unknown or active not in known:
        raise ModelError(
            f"{uri} pools with {', '.join(unknown + active)}; this program knows the mean over "
            "tokens, the first token, and normalisation. Bring it as python:MODULE:CALLABLE."
        )
    return _Pooling(active == ["pooling_mode_cls_token"], "Normalize" in kinds)


def _refuse_unsafe(folder: _Folder, source: ModelSource) -> None:
    check_config(folder.config, uri=source.uri, file="config.json")
    _refuse_beside(folder)
    code = code_named(folder.config)
    if code and not source.allow_code:
        raise ModelError(
            f"{source.uri} was not opened: its config.json asks to run Python code of the folder "
            f"({', '.join(code)}).\n"
            "If you trust that code, set allow_code = true under [model] in the policy."
        )
    if any(folder.path.glob("*.safetensors")):
        return
    pickles = sorted(file.name for file in folder.path.glob("*.bin"))
    if not pickles:
        raise ModelError(f"{source.uri} holds no weights (*.safetensors). Fetch it again.")
    if not source.allow_pickle:
        raise ModelError(
            f"{source.uri} was not opened: {', '.join(pickles)} is a pickle, which runs whatever "
            "it holds.\nSave it without: model.save_pretrained(FOLDER) writes safetensors.\n"
            "Or, if you trust whoever made it, set allow_pickle = true under [model] in the policy."
        )


def _refuse_beside(folder: _Folder) -> None:
    """Refuse files that make transformers read what is not in the folder."""
    adapter = folder.path / "adapter_config.json"
    if adapter.is_file():
        raise ModelError(
            f"{folder.uri} was not opened: {adapter.name} makes it an adapter of another model, "
            "which is not in the folder. Merge the two (merge_and_unload() of peft) and save the "
            "result with save_pretrained()."
        )
    for index in sorted(folder.path.glob("*.index.json")):
        try:
            named = json.loads(index.read_text())
        except ValueError as error:
            raise ModelError(f"{folder.uri}: {index.name} is damaged: {error}.") from error
        weights = named.get("weight_map") if isinstance(named, dict) else None
        for file in sorted(map(str, weights.values() if isinstance(weights, dict) else ())):
            if Path(file).name != file:
                raise ModelError(
                    f"{folder.uri} was not opened: weight_map of its {index.name} names "
                    f"{file!r:.200}, and all weights must be files of the folder itself. Save the "
                    "model again with save_pretrained()."
                )


def _program(folder: _Folder, source: ModelSource) -> Program:
    axis = Axis("sequence", largest=folder.largest_sequence)
    module = _answering(_loaded(folder, source), folder).eval()
    return Program(module, source.uri, axes={name: {1: axis} for name in _INPUTS})


def _loaded(folder: _Folder, source: ModelSource) -> Any:
    import torch  # noqa: PLC0415

    os.environ.setdefault("USE_HUB_KERNELS", "0")  # read when transformers is imported
    import transformers  # noqa: PLC0415

    name = "AutoModelForSequenceClassification" if folder.classifies else "AutoModel"
    kind: Any = getattr(transformers, name)
    with _quiet(), _offline():
        try:
            model, report = kind.from_pretrained(
                folder.path,
                local_files_only=True,
                use_safetensors=None if source.allow_pickle else True,
                trust_remote_code=source.allow_code,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except Exception as error:
            first_line = str(error).strip().partition("\n")[0]
            raise ModelError(
                f"{source.uri} cannot be opened: {type(error).__name__}: {first_line}\n"
                f"It was read as {folder.architecture} by transformers {transformers.__version__}."
            ) from error
    missing = sorted(n for n in report["missing_keys"] if folder.classifies or "pooler" not in n)
    if missing:
        raise ModelError(
            f"{source.uri} lacks {len(missing)} weights of {folder.architecture}, which would be "
            f"random: {', '.join(missing[:3])}. Save the trained model with save_pretrained()."
        )
    return model


def _answering(model: Any, folder: _Folder) -> "torch.nn.Module":
    import torch  # noqa: PLC0415

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            token_type_ids: torch.Tensor | None = None,
        ) -> dict[str, torch.Tensor]:
            given = {"input_ids": input_ids, "attention_mask": attention_mask}
            if token_type_ids is not None:
                given["token_type_ids"] = token_type_ids
            answer = self.model(**given)
            if folder.classifies:
                return {"logits": answer.logits}
            return {"embedding": _pooled(answer.last_hidden_state, attention_mask, folder.pooling)}

    return Encoder()


def _pooled(states: "torch.Tensor", mask: "torch.Tensor", pooling: _Pooling) -> "torch.Tensor":
    """``(batch, sequence, width)`` -> ``(batch, width)``."""
    import torch  # noqa: PLC0415

    if pooling.first_token:
        vector = states[:, 0]
    else:
        weight = mask.unsqueeze(-1).to(states.dtype)
        vector = (states * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(vector, dim=1) if pooling.normalised else vector


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing is fetched, whatever a model asks for; other threads' use of the hub waits."""
    import huggingface_hub.constants  # noqa: PLC0415

    hub: Any = huggingface_hub.constants
    with _OFFLINE_LOCK:
        before, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            hub.HF_HUB_OFFLINE = before


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no report about weights: what matters of it becomes an error."""
    import transformers.utils.logging  # noqa: PLC0415

    logging: Any = transformers.utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
