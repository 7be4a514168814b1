"""The command line. A user's mistake gives one line on stderr and exit code 2, never a traceback."""

from tiercel.cli.commands import main

__all__ = ["main"]
