"""Writing, checking and explaining policies."""
