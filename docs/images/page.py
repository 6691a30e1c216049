"""Takes the pictures of the live page in `docs/images/page`: before, in and after a recovery, at 390 and 1,200 px.

    python docs/images/page.py [RECORDS]

Without RECORDS a run of the laptop preset loses rank 3 in step 12, and the spare steps in; its records at the three
moments are kept in a folder that is named at the end, from which RECORDS takes the pictures again. Needs
chromium-headless-shell.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from PIL import Image, ImageChops

from elastic_ring.monitor.page import Page

OUT = Path(__file__).resolve().parent / "page"
HEIGHTS = {390: 2800, 1200: 1600}
MOMENTS = ("before", "in", "after")
FAULTS = "kill@step=12,phase=backward,rank=3"
RUN_S = 300.0


def records_of_a_run(folder: Path) -> None:
    """Train, and copy the run's records into `folder`/MOMENT at each moment."""
    run = folder / "run" / "laptop"
    settings = [
        "--preset",
        "laptop",
        "--steps",
        "30",
        "--run-name",
        "laptop",
        "--run-dir",
        str(run),
        "--faults",
        FAULTS,
    ]
    training = subprocess.Popen([sys.executable, "-m", "elastic_ring", "train", *settings])
    deadline, left = time.monotonic() + RUN_S, list(MOMENTS)
    try:
        while left and time.monotonic() < deadline:
            if left[0] == moment_of(run):
                shutil.copytree(run, folder / left.pop(0) / "laptop", ignore=shutil.ignore_patterns("checkpoints"))
            if left == ["after"] and training.poll() is not None:
                break
            time.sleep(0.02)
        if training.wait(max(0.0, deadline - time.monotonic())) or left:
            raise SystemExit(f"the run ended with {training.returncode}, without the moments {left}")
    finally:
        training.kill()


def moment_of(run: Path) -> str:
    try:
        status = json.loads((run / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not yet, or while it is replaced
        return ""
    if status["recoveries"]:
        return "after" if status["step"] >= 22 else ""
    return "in" if status["generation"] > 1 else "before" if status["step"] >= 8 else ""


def picture(url: str, width: int, profile: Path) -> Image.Image:
    command = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=3000", "--hide-scrollbars", f"--window-size={width},{HEIGHTS[width]}"]
    path = profile.with_suffix(".png")
    subprocess.run([*command, f"--screenshot={path}", url], check=True, capture_output=True, timeout=120)
    shot = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    below = Image.new("RGB", shot.size, shot.getpixel((1, shot.height - 1)))
    bottom = (ImageChops.difference(shot, below).getbbox() or (0, 0, *shot.size))[3]
    return shot.crop((0, 0, shot.width, min(shot.height, bottom + 12))).quantize(128, Image.Quantize.MAXCOVERAGE)


def main(records: Path) -> None:
    OUT.mkdir(exist_ok=True)
    for moment in MOMENTS:
        folder = records / moment / "laptop"
        with Page(lambda folder=folder: folder) as page, tempfile.TemporaryDirectory() as profiles:
            threading.Thread(target=page.serve, daemon=True).start()
            for width in HEIGHTS:
                picture(page.url, width, Path(profiles, str(width))).save(OUT / f"{moment}-{width}.png", optimize=True)
            page.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        kept = Path(tempfile.mkdtemp(prefix="page-records-"))
        records_of_a_run(kept)
        main(kept)
        print(f"the records are in {kept}")
