"""Another server's host pages as a store."""

from tiercel.storage.peer.store import PeerStore

__all__ = ["PeerStore"]
