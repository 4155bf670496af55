"""How Triton serves an engine: what a search may vary, and what a policy sets once.

- **ServingConfig**: the axes of the search; a benchmark chooses one, a release serves it.
- **ServingOptions**: everything else of ``config.pbtxt`` that a policy may set; the same for every
  configuration that is measured, and for the release.
- **BackendSettings**: what the engine decides, so that a backend runs it as it was validated.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from enginegate.messages import matching
from enginegate.records import Record

ResourceName = Annotated[
    str, matching(r"^[A-Za-z][A-Za-z0-9_]{0,63}$", "a name of letters, digits and _")
]


STREAMS_PARAMETER = "streams"
"""Of a model's configuration: how many batches our runner computes at once in a process."""


class ServingConfig(Record):
    """How Triton serves an engine: the axes of the search."""

    max_batch_size: PositiveInt
    max_queue_delay_us: NonNegativeInt
    instances: PositiveInt = Field(
        description="copies of the engine: on each GPU, else in all; of our runner on a GPU, "
        "streams of each of its processes"
    )
    preferred_batch_sizes: tuple[PositiveInt, ...] = ()
    gpus: tuple[NonNegativeInt, ...] = Field(
        default=(), description="GPUs that instances are placed on; empty: every one there is"
    )
    dynamic_batching: bool = Field(default=True, description="false: each request runs alone")
    processes: PositiveInt = Field(
        default=1,
        description="of our runner on a GPU: processes that share each GPU, each with a CUDA "
        "context and a copy of the engine of its own",
    )

    def __str__(self) -> str:
        said = [f"batch <= {self.max_batch_size}", f"delay {self.max_queue_delay_us} us"]
        if self.preferred_batch_sizes:
            said.append(f"preferred {'/'.join(map(str, self.preferred_batch_sizes))}")
        said.append(f"{self.instances} instance{'s' if self.instances > 1 else ''}")
        if self.processes > 1:
            said.append(f"{self.processes} processes")
        if self.gpus:
            said.append(f"on GPU {'/'.join(map(str, self.gpus))}")
        if not self.dynamic_batching:
            said.append("no dynamic batching")
        return ", ".join(said)


class BackendSettings(Record):
    """What a Triton backend is given so that it runs an engine as it was validated.

    They follow from the engine and the backend alone; benchmark, live release and the filed
    configuration carry the same ones.
    """

    parameters: dict[str, str] = Field(
        default_factory=dict, description="string parameters of the model's configuration"
    )
    graph_level: Literal[-1, 0, 1, 2] = Field(
        default=0,
        description="optimization.graph.level of the native onnxruntime backend: -1 basic, 0 all "
        "(its default), 1 extended, 2 none",
    )
    cuda_provider: dict[str, str] = Field(
        default_factory=dict,
        description="settings of ONNX Runtime's CUDA provider in the native onnxruntime backend",
    )


class ServingOptions(Record):
    """Triton's settings besides batching and instances; every default is Triton's own."""

    backend: Literal["auto", "native", "python"] = Field(
        default="auto",
        description="native: tensorrt_plan or onnxruntime_onnx; python: this program's runner in "
        "the Python backend; auto asks the server and takes native where it is there",
    )
    priority_levels: NonNegativeInt = Field(default=0, description="request priorities; 0: none")
    default_priority_level: NonNegativeInt = Field(
        default=0, description="of a request that names none; needed with priority_levels"
    )
    max_queue_size: NonNegativeInt = Field(
        default=0, description="requests that may wait before others are rejected; 0: no limit"
    )
    queue_timeout_us: NonNegativeInt = Field(
        default=0, description="a request that waited this long is timed out; 0: never"
    )
    timeout_action: Literal["reject", "delay"] = Field(
        default="reject", description="what becomes of a request that timed out in the queue"
    )
    allow_timeout_override: bool = Field(
        default=False, description="whether a request may shorten its own queue timeout"
    )
    preserve_ordering: bool = Field(
        default=False, description="answer in the order of arrival, also across instances"
    )
    response_cache: bool = Field(
        default=False,
        description="answer repeated inputs from Triton's cache (the server needs --cache-config); "
        "off while benchmarking, where it would flatter",
    )
    rate_limiter_resources: dict[ResourceName, PositiveInt] = Field(
        default_factory=dict, description="resources an execution needs (server: --rate-limit)"
    )
    rate_limiter_priority: NonNegativeInt = Field(
        default=0, description="weight against other models; 0: Triton's default"
    )
    input_pinned_memory: bool = Field(default=True, description="pinned buffers for inputs")
    output_pinned_memory: bool = Field(default=True, description="pinned buffers for outputs")
    gather_kernel_buffer_threshold: NonNegativeInt = Field(
        default=0, description="buffers from which inputs are gathered by a GPU kernel; 0: never"
    )
    eager_batching: bool = Field(
        default=False, description="prepare the next batch before an instance is free"
    )
    cuda_graphs: bool = Field(default=False, description="TensorRT plans: capture CUDA graphs")
    cuda_graph_batch_sizes: tuple[PositiveInt, ...] = Field(
        default=(),
        description="with cuda_graphs: batch sizes with a graph of their own; empty: 1, the "
        "preferred ones and the largest. Batches of other sizes run without a graph",
    )
    cuda_busy_wait_events: bool = Field(default=False, description="TensorRT plans: spin on events")
    cuda_output_copy_stream: bool = Field(
        default=False, description="TensorRT plans: copy outputs on a stream of their own"
    )
    model_priority: Literal["default", "max", "min"] = Field(
        default="default", description="TensorRT plans: CUDA stream priority"
    )
    warmup_batch_sizes: tuple[PositiveInt, ...] = Field(
        default=(),
        description="batches run before a version is ready; empty: 1, the preferred ones and the "
        "largest",
    )
    warmup_count: PositiveInt = Field(default=1, description="how often each of them is run")

    @property
    def uncached(self) -> "ServingOptions":
        """The same without the response cache: what a benchmark measures with."""
        return self.model_copy(update={"response_cache": False})

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bool(self.priority_levels) != bool(self.default_priority_level):
            raise ValueError("priority_levels and default_priority_level need each other")
        if self.default_priority_level > self.priority_levels:
            raise ValueError(
                f"default_priority_level is {self.default_priority_level}, and there are "
                f"{self.priority_levels} priority_levels"
            )
        if self.preserve_ordering and self.priority_levels > 1:
            raise ValueError("preserve_ordering allows one priority level only")
        if self.cuda_graph_batch_sizes and not self.cuda_graphs:
            raise ValueError("cuda_graph_batch_sizes needs cuda_graphs = true")
        if self.timeout_action == "delay" and not (
            self.queue_timeout_us or self.allow_timeout_override
        ):
            raise ValueError('timeout_action = "delay" needs queue_timeout_us')
        return self
