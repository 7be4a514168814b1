"""The command line. A user's mistake gives one line on stderr and exit code 2, never a traceback."""

import signal


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the import takes a second, and Ctrl-C no traceback
    from tiercel.cli.commands import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


__all__ = ["main"]
