"""Hot functions with primitive arguments, each with a twin in plain torch. Imports no room but `errors`."""
