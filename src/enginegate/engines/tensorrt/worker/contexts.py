"""Execution contexts of one plan, for the program that runs plans and for Triton's Python backend.

The file is copied beside the latter as ``tensorrt_contexts.py``, so it imports nothing.
"""

from typing import Any


class ContextMaker:
    """Execution contexts that run one after the other and share the memory of activations.

    Args:
        device: allocates memory: ``allocate(size) -> address``.
        shared: whether contexts may share the plan's profile: always from TensorRT 10 on, and in
            8.6 where the plan was built for it.
    """

    def __init__(self, trt: Any, engine: Any, device: Any, *, shared: bool) -> None:
        self._trt, self._shared = trt, shared
        has_new = hasattr(engine, "device_memory_size_v2")
        self._size = int(engine.device_memory_size_v2 if has_new else engine.device_memory_size)
        self._memory = device.allocate(self._size)
        self.use(engine)

    def use(self, engine: Any) -> None:
        """Make the next contexts of this copy of the plan."""
        self.engine, self._how = engine, _without_memory(self._trt, engine)

    def make(self, stream: Any) -> Any:
        """One more context, for runs on this stream; None if there is no room, or no profile."""
        if self._how is None:  # before TensorRT 10
            context = self.engine.create_execution_context_without_device_memory()
        else:
            context = self.engine.create_execution_context(self._how)
        if context is None or not self._has_profile(context, stream):
            return None
        if hasattr(context, "set_device_memory"):
            context.set_device_memory(self._memory, self._size)
        else:
            context.device_memory = self._memory
        return context

    def _has_profile(self, context: Any, stream: Any) -> bool:
        """Before TensorRT 10 the first context has the profile, and others have to ask for it."""
        if context.active_optimization_profile >= 0:
            return True
        if not self._shared:
            return False
        try:
            self._shared = bool(context.set_optimization_profile_async(0, stream.address))
        except RuntimeError:
            self._shared = False
        stream.wait()
        return self._shared


def _without_memory(trt: Any, engine: Any) -> Any:
    """How to ask for a context without memory from TensorRT 10 on; None before.

    TensorRT-RTX compiles kernels for each context, unless they share a cache.
    """
    strategy = getattr(trt, "ExecutionContextAllocationStrategy", None)
    if strategy is None or not hasattr(getattr(trt, "IRuntimeConfig", None), "set_runtime_cache"):
        return strategy and strategy.USER_MANAGED
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(strategy.USER_MANAGED)
    config.set_runtime_cache(config.create_runtime_cache())
    return config
