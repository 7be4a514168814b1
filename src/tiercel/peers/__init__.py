"""Other servers: what this one offers them. (What they offer is a store, `storage.peer`.)"""
