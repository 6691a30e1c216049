"""Other versions of Python that this host has: the package's syntax is theirs, too."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_package_compiles_without_a_warning(version: str, tmp_path: Path) -> None:
    own = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "", "PYENV_VERSION": version}
    python, environment = shutil.which(f"python{version}"), {**os.environ, **own}
    if python is None or subprocess.run([python, "-V"], env=environment, capture_output=True).returncode:
        pytest.skip(f"no python{version}")
    command = [python, "-W", "error", "-m", "compileall", "-q", "elastic_ring"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
