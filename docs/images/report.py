"""Makes report.png: the page of a run in which a process was killed and another one hung, and of one without faults.

`python docs/images/report.py` trains the digits twice (about a minute on two cores), and wants Chromium.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

LOCKSTEP = [sys.executable, "-m", "lockstep"]
TRAIN = [*LOCKSTEP, "train", "digits", "--threads", "1", "--epochs", "12", "--log-every", "5"]
FAULTY = ["--exact", "4", "--checkpoint-every", "20steps", "--hang-timeout", "6"]
HERE = Path(__file__).parent


def records(folder: Path) -> list[dict[str, Any]]:
    """The journal's records so far."""
    path = folder / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until(folder: Path, starts: int, step: int) -> list[int]:
    """Wait for a step of the run's start number `starts`; returns that start's pids by rank."""
    while True:
        found = records(folder)
        begun = [place for place, record in enumerate(found) if record["kind"] == "run"]
        if len(begun) >= starts:
            after = found[begun[starts - 1] :]
            if any(record["kind"] == "step" and record["step"] >= step for record in after):
                return list(after[0]["pids"])
        time.sleep(0.02)


def faulty(folder: Path) -> None:
    """Three processes, of which one is killed and one is stopped; then one process; then two, to the end."""
    command = [*TRAIN, *FAULTY, "--out", str(folder)]
    training = subprocess.Popen([*command, "--nproc", "3"])
    os.kill(until(folder, 1, 60)[2], signal.SIGKILL)
    os.kill(until(folder, 2, 110)[1], signal.SIGSTOP)
    until(folder, 3, 150)
    training.send_signal(signal.SIGINT)
    training.wait()
    training = subprocess.Popen([*command, "--nproc", "1"])
    until(folder, 4, 200)
    training.kill()
    training.wait()
    subprocess.run([*command, "--nproc", "2"], check=True)


def main() -> None:
    """Train, report, and take the picture."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        sys.exit("report.py: Chromium is not installed")
    with tempfile.TemporaryDirectory() as place:
        faults, plain = Path(place, "with-faults"), Path(place, "without")
        faulty(faults)
        subprocess.run([*TRAIN, "--nproc", "2", "--lr", "1e-3", "--out", str(plain)], check=True)
        page = Path(place, "report.html")
        subprocess.run([*LOCKSTEP, "report", str(faults), str(plain), "--out", str(page)], check=True)
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1100,1240"]
        shot = HERE / "report.png"
        subprocess.run([browser, *words, f"--screenshot={shot}", page.as_uri()], check=True)
        with Image.open(shot) as picture:
            picture.convert("RGB").quantize(96).save(shot, optimize=True)  # a third of the bytes
        if len(sys.argv) > 1:  # keep the page there
            shutil.copy(page, sys.argv[1])


if __name__ == "__main__":
    main()
