"""The `dlm-decode` command: finds the subcommand, runs it, and words its errors.

Exit status: 0 done, 1 some input rows were not decoded, 2 a mistake in options, files or model,
130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from dlm_decode import __version__
from dlm_decode.commands import Command, commands
from dlm_decode.errors import DlmDecodeError

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; a user's mistake prints one line."""
    try:
        args = build_parser().parse_args(argv)
        _tolerate_any_text()
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except DlmDecodeError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("dlm-decode: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except OSError as error:
        return _fail(_file_message(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _fail(f"not enough memory: {_first_line(error)}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dlm-decode",
        description="Decode masked diffusion language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dlm-decode {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands().items():
        _add_command(subparsers, name, command)
    return parser


def _add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], name: str, command: Command
) -> None:
    description = (command.__doc__ or "").strip()
    parser = subparsers.add_parser(
        name,
        help=description.split("\n", 1)[0],
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an allocation that failed, on the host or on a device."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def _fail(message: str) -> int:
    print(f"dlm-decode: error: {message}", file=sys.stderr)
    return 2


def _file_message(error: OSError) -> str:
    named = error.filename is not None and error.strerror is not None
    return f"{error.filename}: {error.strerror}" if named else _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0]


def _tolerate_any_text() -> None:
    """What the terminal's encoding lacks is printed as an escape instead of failing."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    """Keep the interpreter from failing again when it flushes a pipe that nobody reads."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
