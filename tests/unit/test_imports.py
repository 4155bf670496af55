"""A laptop without a GPU stack can import every module of the library."""

import pkgutil
import subprocess
import sys

import enginegate

VENDORS = (
    *("great_expectations", "jinja2", "matplotlib", "mlflow", "onnxruntime"),
    *("datasets", "PIL", "pyarrow"),
    *("pandas", "prefect", "prometheus_client"),
    *("tensorrt", "tensorrt_rtx", "torch", "tritonclient", "grpc", "cuda"),
)
# They run inside Triton, or in a builder's process, where their vendor is what they are for.
_ELSEWHERE = {
    "enginegate.engines.onnxruntime.serve",
    "enginegate.engines.python_backend.model",
    "enginegate.engines.torch_inductor.serve",
}


def test_every_module_imports_without_vendor_libraries():
    """Vendors are imported where they are used, so the command starts fast and everywhere."""
    walked = pkgutil.walk_packages(enginegate.__path__, "enginegate.")
    names = [module.name for module in walked if module.name not in _ELSEWHERE]
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({VENDORS!r}))\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert len(names) > 40
