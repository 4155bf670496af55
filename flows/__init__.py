"""The story, in the order it happens."""

import logging

# Prefect passes on what the logger "enginegate" lets through; by itself that is warnings only.
if logging.getLogger("enginegate").level == logging.NOTSET:
    logging.getLogger("enginegate").setLevel(logging.INFO)
