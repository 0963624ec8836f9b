"""The command line: parse, call, print. One command, one module; its heavy imports live in the function body.

Output for machines goes to stdout, words for people to stderr. Every HfoptError becomes one message and its exit code.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from hfopt.cli.output import NO_PLACE, give_up_stdout, print_error, say_what_the_terminal_can
from hfopt.errors import HfoptError


def _version(show: bool) -> None:
    if show:
        from hfopt import __version__

        sys.stdout.write(f"hfopt {__version__}\n")
        raise typer.Exit


def root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit.")) -> None:
    pass


COMMANDS: tuple[str, ...] = (
    # one module of this package each, in the order --help lists them; its function of the same name is the command
    "check",
    "estimate",
    "plan",
    "compare",
    "explain",
    "diff",
    "calibrate",
    "run",
    "rehearse",
    "watch",
    "report",
    "gpus",
    "cache",
    "doctor",
)


def application(arguments: Sequence[str]) -> typer.Typer:
    """The app with the one command that is asked for, or with all where it is not clear which: for --help, a typo, completion."""
    app = typer.Typer(
        name="hfopt",
        help="Find the HuggingFace Trainer settings that train the same model fastest without running out of memory.",
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help: loading rich's renderer would double the time it takes
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(root)
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        module = import_module(f"hfopt.cli.{name}")
        app.command(name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(getattr(module, name))
    return app


def command() -> None:
    """The console script. Where torch was imported it is not taken apart object by object at the end: that takes more than a second."""
    try:
        main()
    except SystemExit as end:
        if "torch" not in sys.modules or not isinstance(end.code, int):
            raise
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(end.code)


def main() -> None:
    """Runs the app and turns our errors into messages."""
    say_what_the_terminal_can()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on import it warns of kernels for the CPU, which nothing here runs
    try:
        try:
            application(sys.argv[1:])(prog_name="hfopt")
        finally:
            sys.stdout.flush()  # a full disk is found here, and not by the interpreter when it has nobody left to tell
    except HfoptError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell counts SIGINT
    except BrokenPipeError:
        give_up_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in NO_PLACE:
            raise
        give_up_stdout()
        print_error(HfoptError(f"cannot write {error.filename or 'the output'}: {error.strerror}"))
        sys.exit(HfoptError.exit_code)
