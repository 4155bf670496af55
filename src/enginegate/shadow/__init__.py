"""Samples of live traffic: recorded or imported, redacted, kept privately, deleted in time.

Not in scope: what a sample says about a candidate (validation/), and load (triton/traffic.py).
"""

from enginegate.shadow.importers import import_sample
from enginegate.shadow.record import RecordingTarget, limits_of, notes_in, record_live, recover
from enginegate.shadow.redaction import called
from enginegate.shadow.sample import SampleInfo, TrafficSample
from enginegate.shadow.store import expire, is_sample, latest_sample, read_sample, sample_info

__all__ = [
    "RecordingTarget",
    "SampleInfo",
    "TrafficSample",
    "called",
    "expire",
    "import_sample",
    "is_sample",
    "latest_sample",
    "limits_of",
    "notes_in",
    "read_sample",
    "record_live",
    "recover",
    "sample_info",
]
