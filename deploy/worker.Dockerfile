# A worker: Enginegate on NVIDIA's image of Triton, so that benchmarks run the server that production
# has, and engines are built by its TensorRT. Build it in the checkout's root:
#   docker build -f deploy/worker.Dockerfile -t enginegate-worker .
ARG TRITON=nvcr.io/nvidia/tritonserver:26.10-py3
FROM ${TRITON}

# Which extras: docs/adr/0002-extras.md. For a processor: cpu instead of gpu, and no tensorrt.
ARG EXTRAS=gpu,tensorrt,triton,torch,signing,s3,gpu-metrics,postgres

COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
COPY flows /src/flows
COPY tasks /src/tasks
COPY validation /src/validation
COPY examples /src/examples
COPY automations /src/automations
COPY policies /src/policies
RUN python3 -m venv --system-site-packages /opt/enginegate \
    && /opt/enginegate/bin/pip install --no-cache-dir -c /src/constraints.txt "/src[${EXTRAS}]" \
    && rm -rf /src

# Triton's Python backend takes the packages of the python3 that is first on PATH.
ENV PATH=/opt/enginegate/bin:$PATH \
    DO_NOT_TRACK=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    MLFLOW_DISABLE_TELEMETRY=true \
    GX_ANALYTICS_ENABLED=false \
    PREFECT_LOGGING_EXTRA_LOGGERS=enginegate

# A new volume takes the owner of the folder that it is mounted on.
RUN useradd --create-home --uid 10001 enginegate \
    && mkdir -p /project /models \
    && chown enginegate /project /models
USER 10001
WORKDIR /project
ENTRYPOINT []
CMD ["prefect", "worker", "start", "--pool", "enginegate"]
