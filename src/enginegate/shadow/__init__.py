"""Samples of live traffic: recorded or imported, redacted, kept privately, deleted in time.

Not in scope: judging a candidate by a sample (validation/), and load (loadgen/).
"""

from enginegate.shadow.importers import import_sample
from enginegate.shadow.record import (
    RecordingTarget,
    record_live,
    recording_notes,
    recover_recordings,
)
from enginegate.shadow.redaction import call_hook
from enginegate.shadow.sample import SampleInfo, TrafficSample
from enginegate.shadow.store import (
    expire_samples,
    is_sample,
    latest_sample,
    read_traffic_sample,
    sample_info,
)

__all__ = [
    "RecordingTarget",
    "SampleInfo",
    "TrafficSample",
    "call_hook",
    "expire_samples",
    "import_sample",
    "is_sample",
    "latest_sample",
    "read_traffic_sample",
    "record_live",
    "recording_notes",
    "recover_recordings",
    "sample_info",
]
