"""Hot functions with primitive arguments, each also in plain torch. They import only `errors`."""
