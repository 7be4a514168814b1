"""`python -m tiercel.cli`."""

from tiercel.cli import main

main()
