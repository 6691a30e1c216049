"""What commands print: text, never a terminal's control sequences, which could come from a file or another process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from elastic_ring.files import printable

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
