"""The wheel, built as a release is, and installed where no checkout is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """The wheel of this checkout, in ``folder``."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """A new environment with the wheel; its ``bin``. Dependencies are those of this environment.

    A ``.pth`` file names their folders. Python does not read ``.pth`` files of a folder that one
    names, so this checkout's editable install is not among them.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True, timeout=120)
    own = {str(ROOT), str(ROOT / "src")}
    installed = [path for path in sys.path if Path(path).is_dir() and path not in own]
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(installed))
    return folder / "bin"
