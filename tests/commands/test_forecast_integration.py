"""The check of forecasts against runs over a limited link: it works, and leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.subprocesses import Command

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(not (shutil.which("ip") and shutil.which("tc")), reason="needs iproute2"),
]
CHECK = Path(__file__).parents[2] / "benchmarks/forecast.py"


def namespaces(*words: str) -> set[str]:
    ended = subprocess.run(["ip", "netns", *words], capture_output=True, text=True)
    return {line.split()[0] for line in ended.stdout.splitlines()}


def hosts(command: Command) -> set[str]:
    """The namespaces in which its runs are under way."""
    runs = [pid for pid, line in command.family().items() if "-m lockstep forecast" in line]
    return {name for pid in runs for name in namespaces("identify", str(pid))}


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
    command = check("--json", "found.json", cwd=tmp_path)
    command.until(lambda: len(hosts(command)) == 2)
    used = hosts(command)
    command.signal(signal.SIGINT)
    ended = command.end(60)
    assert ended.code != 0, ended.text
    assert not ended.orphans
    assert len(used) == 2
    assert not used & namespaces("list")
