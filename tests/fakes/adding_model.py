"""A model of Triton's Python backend that adds its engine's number to what it gets."""

ADDING_MODEL = """
import pathlib
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(args["model_repository"]) / args["model_version"]
        self.offset = np.float32((folder / "engine.bin").read_text())

    def execute(self, requests):
        xs = [np.from_dlpack(pb.get_input_tensor_by_name(r, "x")) for r in requests]
        return [
            pb.InferenceResponse([pb.Tensor.from_dlpack("y", x + self.offset)]) for x in xs
        ]
"""
