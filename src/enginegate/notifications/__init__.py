"""Messages to people where they are: what waits for them, and what is no longer as promised."""

from enginegate.notifications.ledger import NoticeLedger
from enginegate.notifications.notice import (
    ApprovalRequest,
    Notice,
    approval_notice,
    over_notice,
    promise_notices,
    release_notices,
    watch_notice,
)
from enginegate.notifications.receivers import (
    SETTING,
    Message,
    ReceiverAnswer,
    Receivers,
    combined,
    receivers_of_environment,
    receivers_of_text,
)

__all__ = [
    "SETTING",
    "ApprovalRequest",
    "Message",
    "Notice",
    "NoticeLedger",
    "ReceiverAnswer",
    "Receivers",
    "approval_notice",
    "combined",
    "over_notice",
    "promise_notices",
    "receivers_of_environment",
    "receivers_of_text",
    "release_notices",
    "watch_notice",
]
