"""`python -m tiercel.cli`."""

from tiercel.cli.commands import main

main()
