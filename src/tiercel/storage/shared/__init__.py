"""The store of one machine for several processes: one of them owns the folder, all read its files."""

from tiercel.storage.shared.store import SharedStore

__all__ = ["SharedStore"]
