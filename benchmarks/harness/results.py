"""Printing tables, and writing results with the date, command line, versions and device that they depend on."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "ray", "flash-attn-4", "ring-flash-attn", "torchft-nightly")


def show(text: str) -> None:
    print(text, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def verdict(missed: Sequence[str], all_hold: str = "all bounds hold") -> str:
    """One line for each bound that was missed, or `all_hold`."""
    return "\n".join(f"MISSED: {line}" for line in missed) or all_hold


def command_line() -> str:
    script = Path(sys.argv[0]).resolve()
    name = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(name), *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Of the packages that figures depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device() -> str:
    """This host's GPUs, or its processor. Imports torch only where the bench did."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} x {platform.machine()}"


def about() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "device": device(),
        "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "versions": versions(),
    }


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """`figures` and what they depend on, into a file that is named on the command line; None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"about": about(), **figures}
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def save(topic: str, name: str, text: str, figures: dict[str, Any]) -> Path:
    """benchmarks/results/TOPIC/NAME-DATE.txt as printed, the figures as .json beside it; the path without suffix."""
    here = about()
    stem = RESULTS / topic / f"{name}-{here['utc'][:10]}"
    head = [
        here["command"],
        f"{here['utc']}, {here['device']}, load {here['load_1_min']}",
        ", ".join(f"{package} {number}" for package, number in here["versions"].items()),
    ]
    stem.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{stem}.txt").write_text("\n".join(head) + f"\n\n{text}\n", encoding="utf-8")
    write_json(Path(f"{stem}.json"), figures)
    show(f"saved as {stem.relative_to(ROOT)}.txt and .json")
    return stem
