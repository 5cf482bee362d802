"""The check of forecasts against runs over a limited link: it works, and leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.subprocesses import Command

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="needs iproute2"),
]
CHECK = Path(__file__).parents[2] / "benchmarks/forecast.py"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def check(*flags: str, cwd: Path) -> Command:
    arguments = ["--links", "100mbit", "--recipes", "digits", "--rounds", "1", *flags]
    return Command(sys.executable, str(CHECK), *arguments, cwd=cwd)


def test_forecast_and_measured_over_a_limited_link(tmp_path: Path) -> None:
    ended = check("--json", "found.json", cwd=tmp_path).end(200)
    assert ended.code == 0, ended.text
    assert not ended.orphans
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"].values()
    assert 80 < row["link"]["bandwidth_mbit"] < 110  # what the token bucket lets through
    assert row["forecast_ms"] > row["exposed_ms"] > 0
    assert row["error"] == pytest.approx(row["forecast_ms"] / row["measured_ms"] - 1)
    assert "forecast" in ended.out


def test_ctrl_c_leaves_no_namespace_and_no_process(tmp_path: Path) -> None:
    before = namespaces()
    command = check("--json", "found.json", cwd=tmp_path)
    command.until(lambda: namespaces() != before)
    time.sleep(3.0)  # until processes run inside
    command.signal(signal.SIGINT)
    ended = command.end(60)
    assert ended.code != 0, ended.text
    assert not ended.orphans
    assert namespaces() == before
