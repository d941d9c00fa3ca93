"""``epmoe COMMAND ...`` or ``python -m launch COMMAND ...``; under torchrun the same line runs on every rank."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from launch.env import read_torchrun
from launch.failure import RankFailure
from launch.signals import Stopped
from placement import __version__
from placement.errors import UserError

if TYPE_CHECKING:
    from launch.session import Starting

COMMANDS = {  # command -> (module with add_arguments and run, help)
    "generate": ("launch.generate", "continue prompts"),
    "demo": ("launch.demo", "the embedded model on 2 ranks, its placement solved from its own traces"),
    "tune": ("launch.tune", "measure the fastest kernel tiles for a model on this GPU"),
    "trace": ("launch.trace_command", "record which experts the tokens of a text choose"),
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
USAGE = "usage: epmoe COMMAND [options]   (epmoe COMMAND --help lists them; epmoe --version)"


def main(argv: list[str] | None = None, starting: Starting | None = None) -> int:
    """Run a command; the exit code: 0, 2 for the user's mistake, 1 for a failed run, 128 + n for signal n.

    ``starting`` says how the ranks come to be; the default spawns them, or is one of them under torchrun.
    """
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model writes what a terminal's encoding may lack
    try:
        if starting is None and (torchrun := read_torchrun()) is not None:
            from launch.rank import leave
            from launch.torchrun import run_rank

            leave(run_rank(torchrun, argv))
        code = _dispatch(argv, starting)
        _flush()
        return code
    except UserError as error:
        return _fail(f"epmoe: error: {' '.join(str(error).split())}", 2)
    except RankFailure as failure:
        if failure.user_error:
            return _fail(f"epmoe: error: {' '.join(failure.reason.split())}", 2)
        return _fail(failure.block(), 1)
    except (Stopped, KeyboardInterrupt) as stopped:
        return _fail(f"epmoe: {str(stopped) or 'stopped by SIGINT'}", getattr(stopped, "exit_code", 130))
    except BrokenPipeError:
        _give_up_output()
        return _fail("epmoe: stopped: nobody reads the output any more", 128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _give_up_output()
        return _fail(f"epmoe: error: cannot write the output: {error.strerror}; send it where there is room", 1)


def _dispatch(argv: list[str], starting: Starting | None) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, *(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()), sep="\n")
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"epmoe {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        raise UserError(f"command {argv[0]} is unknown; use {', '.join(COMMANDS)}")
    module = importlib.import_module(COMMANDS[argv[0]][0])
    from launch.args import Parser

    description = module.__doc__.replace("``", "")  # a terminal shows no markup
    parser = Parser(prog=f"epmoe {argv[0]}", description=description, allow_abbrev=False)
    module.add_arguments(parser)
    return module.run(parser.parse_args(argv[1:]), starting)


def _fail(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        _flush()
    print(message, file=sys.stderr, flush=True)
    return code


def _flush() -> None:
    if sys.stdout is not None:  # as where the shell closed it
        sys.stdout.flush()


def _give_up_output() -> None:
    """What is left for standard output goes nowhere, so that the interpreter's last flush cannot fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
