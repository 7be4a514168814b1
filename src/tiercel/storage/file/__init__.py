"""The store of one machine: records in the segments of a folder."""

from tiercel.storage.file.store import FileStore

__all__ = ["FileStore"]
