"""The story, in the order it happens."""

import logging

from tasks.prefect_server import guard_own_server

# Prefect passes on what the logger "enginegate" lets through; by itself that is warnings only.
if logging.getLogger("enginegate").level == logging.NOTSET:
    logging.getLogger("enginegate").setLevel(logging.INFO)

guard_own_server()
