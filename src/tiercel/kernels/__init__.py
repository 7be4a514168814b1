"""Hot functions with primitive arguments, each also in plain torch. Imports no room but `errors`."""
