"""A model, its data and an SLO, given to a function: they become a policy file, once.

The file is what people approve under and what a promotion names, so it is written as
``enginegate init`` writes it, into ``policies/``, and is theirs to edit from then on.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from enginegate.cli.output.json_output import Printer
from enginegate.cli.policy.first_policy import name_for
from enginegate.cli.policy.init import InitOptions, write_first_policy
from enginegate.cli.policy.model_address import model_uri
from enginegate.errors import InputError
from enginegate.policy.paths import project_of


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What somebody knows of a model of theirs.

    Attributes:
        model: a file, a folder or an address, as ``enginegate init`` takes it.
        data: labelled samples that training never saw: a path, or an address of data.
        p99_ms: 99th percentile of latency at the client.
        min_throughput_per_s: requests a second that traffic needs.
        task: what the outputs mean; None: found out from model and data.
        name: in the live repository; None: after the model.
        calibration: other samples, for int8 scales; None: some of the data are set aside.
    """

    model: str
    data: str
    p99_ms: float
    min_throughput_per_s: float
    task: str | None = None
    name: str | None = None
    calibration: str | None = None
    allow_pickle: bool = False
    allow_code: bool = False

    def policy(self) -> Path:
        """The policy file in ``policies/`` that says this; written now unless it is there.

        Raises:
            InputError: the model or the data cannot be used, their task is not to be seen, or a
                policy of that name is there which says something else.
        """
        name = self.name or name_for(model_uri(self.model, Path.cwd()))
        path = project_of(Path.cwd()) / "policies" / f"{name}.toml"
        if not path.exists():
            self._write(path, name)
            return path
        again = path.with_name(f".{name}.{os.getpid()}.toml")
        try:
            self._write(again, name)
            # The first line is a comment with the file's own name.
            same = _body(again) == _body(path)
        finally:
            again.unlink(missing_ok=True)
        if not same:
            raise InputError(
                f"{path} is there already and says something else than what was given. Qualify "
                "under that file by its path, or give the new one another name (name=...)."
            )
        return path

    def _write(self, path: Path, name: str) -> None:
        options = InitOptions(
            model=self.model,
            data=self.data,
            calibration=self.calibration,
            task=self.task,
            name=name,
            p99_ms=self.p99_ms,
            min_throughput_per_s=self.min_throughput_per_s,
            output=path,
            allow_pickle=self.allow_pickle,
            allow_code=self.allow_code,
            ask=False,
        )
        write_first_policy(options, Printer(Console(quiet=True)))


def _body(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:]
