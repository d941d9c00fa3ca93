"""``epmoe-placement``: the command line of the placement optimiser."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from typing import NoReturn

from placement import __version__
from placement.cli import compare, convert, inspect, report, simulate, solve, validate
from placement.errors import UserError
from placement.threads import one_blas_thread

DESCRIPTION = """\
Decide which GPU holds which expert of a mixture-of-experts model, from recorded routing.

  inspect a recording -> solve or compare -> report and simulate -> convert for your engine
"""
COMMANDS = (solve, compare, report, inspect, convert, validate, simulate)


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line and no usage text; the parsers of commands are such too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> Parser:
    parser = Parser(
        prog="epmoe-placement",
        description=DESCRIPTION,
        epilog="`epmoe-placement COMMAND --help` shows examples. Errors of use exit with code 2.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"epmoe-placement {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    one_blas_thread()
    try:
        code = args.run(args)
        if sys.stdout is not None:  # as where the shell closed it
            sys.stdout.flush()
        return code
    except UserError as error:
        print(f"epmoe-placement {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left, as `head` does
        _give_up_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        _give_up_output()
        print(f"epmoe-placement {args.command}: cannot write the output: {error.strerror}; make room", file=sys.stderr)
        return 1


def _give_up_output() -> None:
    """What is left for standard output goes nowhere, so that the interpreter's last flush cannot fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main())
