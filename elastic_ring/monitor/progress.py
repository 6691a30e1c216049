"""The progress of a run: a bar on a terminal, a plain line every few seconds anywhere else.

Writes to the given stream, because progress is a job's output; log lines go through `logging`. Nothing here decides or
measures.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

from elastic_ring.files import printable
from elastic_ring.monitor.metrics import StepMetrics
from elastic_ring.monitor.report import duration, human_rate


class _Bar(tqdm):
    monitor_interval = 0  # no helper thread: it would only redraw a stalled bar


class ProgressLine:
    """Shows step, loss, learning rate, gradient norm, tokens/s, time left, generation and members of a run as steps are
    committed."""

    def __init__(
        self,
        stream: TextIO,
        total_steps: int,
        *,
        plain_every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._plain_every_s = plain_every_s
        self._clock = clock
        self._bar: _Bar | None = None
        self._written_at_s = -math.inf
        self._num_done = 0
        self._first: tuple[float, int] | None = None  # when the first step was shown, and the number done by then
        self._latest: StepMetrics | None = None
        self._latest_written = True

    def open(self, first_step: int = 0) -> ProgressLine:
        """Start at `first_step`, the number of steps already done."""
        self._num_done = first_step
        if _is_terminal(self._stream):
            self._bar = _Bar(
                total=self._total_steps,
                initial=first_step,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                mininterval=0.1,
                miniters=1,
                bar_format="{desc}{n_fmt}/{total_fmt} |{bar:16}| {elapsed}<{remaining}{postfix}",
            )
        return self

    def step(self, metrics: StepMetrics) -> None:
        """Show a committed step; an earlier one where the run has gone back."""
        num_new = metrics.step + 1 - self._num_done
        self._num_done += num_new
        self._latest, self._latest_written = metrics, False
        if self._first is None or num_new < 0:
            self._first = self._clock(), self._num_done
        if self._bar is not None:
            self._bar.set_postfix_str(_figures(metrics), refresh=False)
            self._bar.update(num_new)
        elif self._clock() - self._written_at_s >= self._plain_every_s:
            self._write_plain()

    def note(self, text: str) -> None:
        """Print a permanent line, above the bar. A worker's own words may be in it."""
        text = printable(text)
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Show the last step, even if it came too soon after the line before."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None
        elif not self._latest_written:
            self._write_plain()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_plain(self) -> None:
        assert self._latest is not None
        self._written_at_s = self._clock()
        self._latest_written = True
        width = len(str(self._total_steps))
        self.note(f"step {self._num_done:>{width}}/{self._total_steps}  {_figures(self._latest)}{self._left()}")

    def _left(self) -> str:
        """The time left at the pace so far, which has validations, checkpoints and recoveries in it."""
        assert self._first is not None
        since, done = self._first
        num_timed, num_left = self._num_done - done, self._total_steps - self._num_done
        if num_timed < 1 or num_left < 1:
            return ""
        return f"  {duration((self._clock() - since) / num_timed * num_left)} left"


def _is_terminal(stream: TextIO) -> bool:
    """Whether to draw a bar; false for a pseudo-terminal of width 0, as in some CI systems."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def _figures(metrics: StepMetrics) -> str:
    loss = f"{metrics.loss:.4f}" if math.isfinite(metrics.loss) else str(metrics.loss)
    skipped = " (skipped)" if metrics.skipped else ""
    return (
        f"loss {loss}{skipped}  lr {metrics.lr:.3g}  grad {metrics.grad_norm:.3g}  "
        f"{human_rate(metrics.tokens_per_s)} tok/s  "
        f"gen {metrics.generation}  {metrics.num_members} members ({metrics.mesh})"
    )
