"""What this server offers to other servers. (What they offer is a store, `storage.peer`.)"""
