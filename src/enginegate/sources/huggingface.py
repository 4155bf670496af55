"""A folder of a Hugging Face encoder -> PyTorch program; the only door to transformers here.

Classifiers give ``logits``. Other encoders give one ``embedding`` a sample: the folder's own
pooling (``modules.json`` of sentence-transformers), else the mean over attended tokens. Inputs are
``input_ids``, ``attention_mask`` and optionally ``token_type_ids``, each ``(batch, sequence)``.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginegate.data import DataSet
from enginegate.errors import ModelError
from enginegate.messages import first_line
from enginegate.policy.model_source import ModelSource
from enginegate.sources import pytorch
from enginegate.sources.pytorch import Axis, Program
from enginegate.sources.types import ExportedModel, OpenedSource, digest_of
from enginegate.sources.untrusted import auto_map_classes, check_config, check_inside, read_json

if TYPE_CHECKING:
    import torch

_OFFLINE_LOCK = threading.Lock()
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_CLASSIFIER = "ForSequenceClassification"
_ENCODER = "Model"
_KINDS: dict[type, str] = {list: "a list", str: "text", int: "a number", float: "a number"}
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "mpnet"}  # two positions are padding


@dataclass(frozen=True, slots=True)
class _Folder:
    """A model folder, read as far as possible without transformers."""

    path: Path
    uri: str
    config: dict[str, Any]
    pools_first_token: bool
    normalises: bool

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
    """Check the folder; transformers is imported when it is converted."""
    folder = _read(source)
    _refuse_unsafe(folder, source)

    def convert(data: DataSet, scratch: Path) -> ExportedModel:
        axis = Axis("sequence", largest=folder.largest_sequence)
        model = _load(folder, source)
        program = Program(
            _encoder(model, folder),
            source.uri,
            axes={name: {1: axis} for name in _INPUTS},
            as_program=lambda: _fused_attention(model),
        )
        return pytorch.onnx_from_program(program, data, scratch)

    return OpenedSource(
        source.uri,
        digest_of(folder.files(code=source.allow_code), folder.path),
        pytorch.torch_exporter("transformers"),
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
    folder = _Folder(path, source.uri, config, *pooling)
    if not (folder.classifies or folder.embeds):
        raise ModelError(
            f"{source.uri} is {folder.architecture}; this program takes encoders that classify "
            f"sequences (...{_CLASSIFIER}) or embed them (...{_ENCODER})."
        )
    return folder


def _table(path: Path, uri: str) -> dict[str, Any]:
    content = read_json(path, uri=uri)
    if not isinstance(content, dict):
        raise ModelError(
            f"{uri}: {path.name} holds {_KINDS.get(type(content), 'a value')}, and must hold a "
            "table of settings. Fetch it again."
        )
    return content


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


def _pooling(path: Path, uri: str) -> tuple[bool, bool]:
    """Whether the first token stands for a sample, not the mean; whether vectors have length 1."""
    if not (path / "modules.json").is_file():
        return False, False
    modules = read_json(path / "modules.json", uri=uri)
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
    if unknown or active not in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"], []):
        raise ModelError(
            f"{uri} pools with {', '.join(unknown + active)}; this program knows the mean over "
            "tokens, the first token, and normalisation. Bring it as python:MODULE:CALLABLE."
        )
    return active == ["pooling_mode_cls_token"], "Normalize" in kinds


def _refuse_unsafe(folder: _Folder, source: ModelSource) -> None:
    check_config(folder.config, uri=source.uri, file="config.json")
    _refuse_beside(folder)
    code = auto_map_classes(folder.config)
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
            content = read_json(index, uri=folder.uri)
        except ValueError as error:
            raise ModelError(f"{folder.uri}: {index.name} is damaged: {error}.") from error
        weights = content.get("weight_map") if isinstance(content, dict) else None
        for file in sorted(map(str, weights.values() if isinstance(weights, dict) else ())):
            if Path(file).name != file:
                raise ModelError(
                    f"{folder.uri} was not opened: weight_map of its {index.name} names "
                    f"{file!r:.200}, and all weights must be files of the folder itself. Save the "
                    "model again with save_pretrained()."
                )


def _load(folder: _Folder, source: ModelSource) -> Any:
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
            raise ModelError(
                f"{source.uri} cannot be opened: {type(error).__name__}: {first_line(error)}\n"
                f"It was read as {folder.architecture} by transformers {transformers.__version__}."
            ) from error
    missing = sorted(n for n in report["missing_keys"] if folder.classifies or "pooler" not in n)
    if missing:
        raise ModelError(
            f"{source.uri} lacks {len(missing)} weights of {folder.architecture}, which would be "
            f"random: {', '.join(missing[:3])}. Save the trained model with save_pretrained()."
        )
    return model


def _encoder(model: Any, folder: _Folder) -> "torch.nn.Module":
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
            states = answer.last_hidden_state  # (batch, sequence, width)
            if folder.pools_first_token:
                vector = states[:, 0]
            else:
                weight = attention_mask.unsqueeze(-1).to(states.dtype)
                vector = (states * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
            if folder.normalises:
                vector = torch.nn.functional.normalize(vector, dim=1)
            return {"embedding": vector}

    return Encoder().eval()


@contextmanager
def _fused_attention(model: Any) -> Iterator[None]:
    """Attention as PyTorch's one operator, which compilers have kernels for; ONNX has none."""
    try:
        model.set_attn_implementation("sdpa")
    except (AttributeError, ValueError, ImportError):  # not every architecture has it
        yield
        return
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


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
