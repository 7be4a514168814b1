"""The command line. A mistake of the caller is one line on stderr and exit code 2, never a traceback."""

from tiercel.cli.commands import main

__all__ = ["main"]
