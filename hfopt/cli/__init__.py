"""The command line: parse, call, print. One command, one module; its heavy imports live in the function body.

Output for machines goes to stdout, words for people to stderr. Every HfoptError becomes one message and its exit code.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

import typer

from hfopt.cli.json_output import CommandLine, answer_error, command_line
from hfopt.cli.output import NO_PLACE, give_up_stdout, print_error, reserved_stdout, say_what_the_terminal_can
from hfopt.compat.fast_import import spare_pydantic
from hfopt.errors import HfoptError


def _version(show: bool) -> None:
    if show:
        from hfopt import __version__

        sys.stdout.write(f"hfopt {__version__}\n")
        raise typer.Exit


def root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version and exit.")) -> None:
    pass


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The parser's complaint about the words, of which BadParameter is one: newer versions of typer carry their own click."""

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
    "schema",
)


STARTS_A_SCRIPT = frozenset({"run", "rehearse"})
"""Commands whose stdout is that of the script they start."""


COMPLETING = "_HFOPT_COMPLETE"
"""Set by the shell that completes a command line, which is not in the arguments then."""


def _listed(function: Callable[..., Any]) -> Callable[..., Any]:
    """What --help says of a command, and nothing else of it."""

    def command() -> None:
        """Never called."""

    command.__doc__ = function.__doc__
    return command


def _alone_on_stdout(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        import logging

        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on import it warns of kernels for the CPU, which nothing here runs
        with reserved_stdout():
            return function(*args, **kwargs)

    return call


def application(arguments: Sequence[str]) -> typer.Typer:
    """The app with the one command that is asked for, or with all where it is not clear which: for --help, a typo, completion.

    Where no command can run, their options are left out: reading them takes longer than all else that --help does."""
    spare_pydantic()
    app = typer.Typer(
        name="hfopt",
        help="Find the HuggingFace Trainer settings that train the same model fastest without running out of memory.",
        no_args_is_help=True,
        rich_markup_mode=None,  # plain help: loading rich's renderer would double the time it takes
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(root)
    options_only = bool(arguments) and all(word.startswith("-") and word != "--" for word in arguments)
    listed = options_only and COMPLETING not in os.environ
    for name in arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS:
        module = import_module(f"hfopt.cli.{name}")
        function = getattr(module, name)
        run = _listed(function) if listed else function if name in STARTS_A_SCRIPT else _alone_on_stdout(function)
        app.command(name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(run)
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


def _parser(words: Sequence[str]) -> tuple[CommandLine, Any]:
    parser: Any = typer.main.get_command(application(words))
    return command_line(words, parser.commands.get(words[0]) if words else None).in_one_form(), parser


def _run(line: CommandLine, parser: Any) -> None:
    """The parser itself says what is wrong with the words; whoever wants JSON gets that as JSON too."""
    if not line.wants_json:
        parser(args=list(line.words), prog_name="hfopt")
        return
    try:
        code = parser(args=list(line.words), prog_name="hfopt", standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except USAGE_ERROR as wrong:
        wrong.show()
        hint = f"`{wrong.ctx.command_path if wrong.ctx else 'hfopt'} --help` lists what can be given"
        answer_error(HfoptError(wrong.format_message(), hint=hint), line.words, kind="UsageError")
        sys.exit(wrong.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def main() -> None:
    """Runs the app and turns our errors into messages."""
    say_what_the_terminal_can()
    try:
        line, parser = _parser(sys.argv[1:])
        try:
            _run(line, parser)
        finally:
            sys.stdout.flush()  # a full disk is found here, and not by the interpreter when it has nobody left to tell
    except HfoptError as error:
        print_error(error)
        if line.wants_json:
            answer_error(error, line.words)
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
