"""A real Slurm of one node, for tests."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

REQUEUE_S = 5  # that a job waits before it starts again; Slurm's own is 120
KILL_WAIT_S = 5  # from SIGTERM to SIGKILL; Slurm's own is 30
GRACE_S = 30  # for a job of the partition main to make room for one of urgent


@contextmanager
def slurm(folder: Path, cpus: int = 2) -> Iterator[dict[str, str]]:
    """A Slurm of one node, this machine, as root; yields the environment that its commands want.

    `cpus`: that it may give away, however many there are.
    """
    if missing := [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)} here (Debian's slurm-wlm and munge have them)")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons want root here")
    host, conf = socket.gethostname(), folder / "slurm.conf"
    key, wire = folder / "munge.key", folder / "munge.socket"
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("", 0))
            ports.append(free.getsockname()[1])
    conf.write_text(
        f"""ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={wire},cred_expire={REQUEUE_S}
CryptoType=crypto/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmUser=root
ReturnToService=2
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
KillWait={KILL_WAIT_S}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP GraceTime={GRACE_S}
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""
    )
    environment = {"SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        own = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "seed", "log")]
        for argv, asked, answer in (
            (
                ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={wire}", *own],
                ["munge", "--no-input", f"--socket={wire}"],
                "^MUNGE:",
            ),
            (["slurmctld", "-D", "-f", str(conf)], ["scontrol", "ping"], " UP$"),
            (["slurmd", "-D", "-f", str(conf)], ["sinfo", "-h", "-o", "%T"], "^idle$"),
        ):
            daemon = subprocess.Popen(
                argv, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            _until(answer, asked, os.environ | environment)
        yield environment


def _until(answer: str, asked: list[str], environment: dict[str, str]) -> None:
    """Ask until the answer has such a line."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        seen = subprocess.run(asked, env=environment, capture_output=True, text=True)
        if re.search(answer, seen.stdout, re.MULTILINE):
            return
        time.sleep(0.1)
    raise AssertionError(f"{' '.join(asked)}: {seen.stdout}{seen.stderr}")
