"""A load on a running server, measured from outside: what is asked, how it is sent, what came of it."""
