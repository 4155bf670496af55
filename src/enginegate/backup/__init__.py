"""One file of all that a project cannot make again, and the way from that file to a new machine."""

from enginegate.backup.archive import BackupHeader, LeftOut, backup_header, check_archive
from enginegate.backup.places import BackupPlaces, RepositoryPlace
from enginegate.backup.restore import RestoredBackup, RestorePlaces, restore_backup
from enginegate.backup.sealing import OpeningKey, SealingKey
from enginegate.backup.write import WrittenBackup, write_backup

__all__ = [
    "BackupHeader",
    "BackupPlaces",
    "LeftOut",
    "OpeningKey",
    "RepositoryPlace",
    "RestorePlaces",
    "RestoredBackup",
    "SealingKey",
    "WrittenBackup",
    "backup_header",
    "check_archive",
    "restore_backup",
    "write_backup",
]
