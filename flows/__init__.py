"""The story, in the order it happens."""

import logging

from tasks.prefect_server import check_prefect_answers, guard_own_server

__all__ = ["check_prefect_answers"]

# Prefect passes on what the logger "enginegate" lets through; by itself that is warnings only.
if logging.getLogger("enginegate").level == logging.NOTSET:
    logging.getLogger("enginegate").setLevel(logging.INFO)

guard_own_server()
