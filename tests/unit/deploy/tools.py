"""Programs and files that validate `deploy` and are not Python packages: skipped with a reason where they are missing,
except in CI, which has to install them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"


def program(name: str, package: str) -> str:
    """The path of a program."""
    found = shutil.which(name)
    if found is None and "ELASTIC_RING_CI" in os.environ:
        pytest.fail(f"{name} is missing in CI: install {package}")
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: {package})")
    return found


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [program("promtool", "prometheus"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
