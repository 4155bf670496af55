"""Samples of live traffic: recorded or imported, redacted, kept privately, deleted in time.

Not in scope: what a sample says about a candidate (validation/), and load (triton/traffic.py).
"""

from enginegate.shadow.foreign import import_sample
from enginegate.shadow.privacy import called
from enginegate.shadow.record import Target, limits_of, notes_in, record_live, recover
from enginegate.shadow.sample import Sample, SampleInfo
from enginegate.shadow.sent import record_sent
from enginegate.shadow.store import expire, is_sample, latest_sample, read_sample, sample_info

__all__ = [
    "Sample",
    "SampleInfo",
    "Target",
    "called",
    "expire",
    "import_sample",
    "is_sample",
    "latest_sample",
    "limits_of",
    "notes_in",
    "read_sample",
    "record_live",
    "record_sent",
    "recover",
    "sample_info",
]
