"""`python -m hfopt` is the `hfopt` command."""

from hfopt.cli import main

main()
