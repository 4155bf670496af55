"""Shared by every test: nothing is sent home, Prefect's server starts lean, no example is timed."""

import os
import signal

from hypothesis import HealthCheck, settings

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_ENABLED", "false")
os.environ.setdefault("PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED", "false")
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
# Whoever runs the tests has messages of their own.
os.environ.pop("ENGINEGATE_NOTIFY", None)
# The first call of a lazily imported library takes longer than Hypothesis lets one example take,
# and a busy machine draws slowly. The examples are drawn alike everywhere, so that a failure is of
# the change that it shows up in.
settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
# A shell that starts the tests in the background has Ctrl-C ignored, and every program that a test
# starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
