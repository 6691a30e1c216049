"""The command line: `elastic-ring COMMAND`. A command's module is imported when it is called, and imports torch and Ray
after it has read its arguments.

Commands print text, never a terminal's control sequences, which could come from a file or another process.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from elastic_ring.errors import TermLost
from elastic_ring.files import denied, printable
from elastic_ring.runtime.driver.stops import heeding

# (module and, other than `main`, its function; what it does) by command
COMMANDS = {
    "train": ("elastic_ring.cli.train", "train a decoder over elastic rings"),
    "status": ("elastic_ring.cli.status", "show a run's mesh, step, spares and last recoveries"),
    "doctor": ("elastic_ring.cli.operate:doctor", "look at a cluster before a run starts on it"),
    "metrics": ("elastic_ring.cli.operate:metrics", "print the table of exported metrics"),
    "scale": ("elastic_ring.cli.operate:scale", "give a run fewer or more rings and spares"),
    "drain": ("elastic_ring.cli.operate:drain", "drain a node and wait until no run has a worker there"),
    "checkpoints": ("elastic_ring.cli.checkpoints", "list, verify, prune and export what a run has saved"),
    "plan": ("elastic_ring.cli.train:main_plan", "print what a run needs, and start nothing"),
    "forecast": ("elastic_ring.cli.forecasts.command", "will it fit, how long, how much, how likely; starts nothing"),
    "tune": ("elastic_ring.cli.tune", "search sparse patterns by quality, time and bytes"),
    "data": ("elastic_ring.cli.data", "prepare documents as token shards for training"),
    "export": ("elastic_ring.cli.checkpoints:export_weights", "write a run's weights as transformers loads them"),
    "calibrate": ("elastic_ring.cli.operate:calibrate", "measure what --layout auto prices with"),
}
# Optional dependencies, and the extra of pyproject.toml that has each.
EXTRAS = {
    "optuna": "tune",
    "matplotlib": "plot",
    "huggingface_hub": "huggingface",
    "tokenizers": "huggingface",
    "transformers": "huggingface",
}

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


class PlainStream:
    """A text stream that shows control characters as `\\x1b`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_terminal() -> Iterator[None]:
    """All that is printed and logged meanwhile is text."""
    out, err = (cast(TextIO, PlainStream(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield


def clear_screen() -> None:
    stream = sys.stdout
    (stream.stream if isinstance(stream, PlainStream) else stream).write(_CLEAR_SCREEN)


@contextmanager
def coloured() -> Iterator[None]:
    """The terminal itself, for text of this program and of the command line alone, such as `--help`."""
    streams = (sys.stdout, sys.stderr)
    out, err = (stream.stream if isinstance(stream, PlainStream) else stream for stream in streams)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def exit_at_signals() -> None:
    """While there is nothing to clear: an import, and Ray's own handlers at the end, would print a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os._exit(128 + number))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, 2 for a command that does not exist, 1 where nobody reads on."""
    if argv is None:  # the process is this command's: a call to a Ray that it has left starts no other one
        exit_at_signals()
        from elastic_ring.config import environment

        environment().setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        try:
            with plain_terminal():
                return _run(argv)
        finally:
            if argv is None:
                exit_at_signals()
            sys.stdout.flush()  # what is left fails here, not when the interpreter exits
    except KeyboardInterrupt as error:
        return refused(f"elastic-ring {sys.argv[1] if argv is None else argv[0]}", error)
    except PermissionError as error:
        if error.filename is None:
            raise
        command = (sys.argv[1:] if argv is None else argv)[0]
        return refused(f"elastic-ring {command}", ValueError(denied(error)))
    except BrokenPipeError:  # as in `elastic-ring train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def refused(command: str, error: BaseException, stopped: str = "stopped") -> int:
    """Print why a command ends, and return its exit status. `stopped`: what Ctrl-C left, where the error does not say
    it."""
    from elastic_ring.cli.endings import status_of

    match error:
        case TermLost() | ValueError():
            message = f"{error}"
        case KeyboardInterrupt():
            message = str(error) or stopped
        case _:
            message = f"{type(error).__name__}: {error}"
    print(f"{command}: {message}", file=sys.stderr)
    return status_of(error)


def _run(argv: Sequence[str] | None) -> int:
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    lines = [f"  {name:<13}{says}" for name, (_, says) in COMMANDS.items()]
    usage = "\n".join(["usage: elastic-ring COMMAND [OPTIONS], with --help for a command's options", "", *lines])
    if command in ("-h", "--help"):
        print(usage)
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"elastic-ring {version('elastic-ring')}")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f": did you mean {close[0]}?" if close else ""
        print(f"elastic-ring: there is no command {command!r}{meant}\n{usage}", file=sys.stderr)
        return 2
    try:
        module, _, function = COMMANDS[command][0].partition(":")
        command_main = getattr(importlib.import_module(module), function or "main")
        with heeding():
            status: int = command_main(rest)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        install = f"pip install '.[{EXTRAS[package]}]'"
        print(f"elastic-ring {command} needs {package}, which is not installed: {install}", file=sys.stderr)
        return 2
    return status
