"""Append-only files of which every edit shows, short or of a million lines."""
