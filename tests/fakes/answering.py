"""A running server without models, for what it answers when a backend is asked for."""

from enginegate.errors import ServerError
from enginegate.triton.types import ServerMetadata

# Both as Triton 2.51 says them.
ABSENT = (
    "load failed for model 'p': version 1 is at UNAVAILABLE state: Invalid argument: unable to "
    "find backend library for backend 'tensorrt', try specifying runtime on the model "
    "configuration.;"
)
DAMAGED = "load failed for model 'p': version 1 is at UNAVAILABLE state: Internal: no such plan;"
POLLING = "explicit model load / unload is not allowed if polling is enabled"


class AnsweringClient:
    """A server without models; ``says`` is what it complains about when a probe is loaded."""

    address = "elsewhere:8001"

    def __init__(self, says=None, name="a", version="2.51.0"):
        self.says, self.name, self.version = says, name, version
        self.loaded, self.unloaded = [], []

    def metadata(self):
        return ServerMetadata(self.name, self.version, ())

    def index(self):
        return ()

    def live(self):
        return True

    def load(self, model, config=None, *, files=None, timeout_s):
        assert timeout_s <= 60
        self.loaded.append((model, config.backend, tuple(files)))
        if self.says and config.backend != "python":
            raise ServerError(self.says)

    def unload(self, model):
        self.unloaded.append(model)
