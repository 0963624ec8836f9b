"""`python -m hfopt` is the `hfopt` command."""

from hfopt.cli import command

command()
