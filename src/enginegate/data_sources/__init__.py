"""Data of every form as data sets: one reader protocol, one module for each form."""

from enginegate.data_sources.describe import DataDescription, describe_data, suggest_columns
from enginegate.data_sources.dispatch import load_data, open_reader, read_source_header
from enginegate.data_sources.reader import Column, DataReader

__all__ = [
    "Column",
    "DataDescription",
    "DataReader",
    "describe_data",
    "load_data",
    "open_reader",
    "read_source_header",
    "suggest_columns",
]
