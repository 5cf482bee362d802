"""How the ranks of a job find each other where nobody named a port.

A job has a sequence of ports of its own, by its name. At the first free one rank 0 tells those who ask for the job by
name where its store is.
"""

import hashlib
import socket
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from lockstep.errors import UserError

_PORTS, _FIRST_PORT, _LAST_PORT = 16, 15_000, 32_000  # below those that systems hand out for outgoing connections
_ASK_S, _PAUSE_S, _LINE = 2.0, 0.1, 512


def ports(job: str) -> list[int]:
    """The ports at which a job's rank 0 may listen, in its order."""
    span = _LAST_PORT - _FIRST_PORT
    draws = (hashlib.sha256(f"{job}/{i}".encode()).digest() for i in range(_PORTS))
    return [_FIRST_PORT + int.from_bytes(draw[:4], "big") % span for draw in draws]


def meet(job: str, host: str, rank: int, size: int, seconds: float) -> Store:
    """The store of a job's ranks, which rank 0 opens and the others find.

    Raises:
        UserError: where all ports of the job are taken, or rank 0 was not found in time.
    """
    limit = timedelta(seconds=seconds)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, timeout=limit)
        _tell(job, store.port, size - 1)
        return store
    return TCPStore(host, _ask(job, host, rank, size, seconds), size, wait_for_workers=False, timeout=limit)


def _tell(job: str, port: int, ranks: int) -> None:
    """At the first of the job's ports that is free, tell so many ranks that ask for the job where its store listens."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for own in ports(job):
        try:
            listener.bind(("", own))
            break
        except OSError:
            continue  # somebody else's
    else:
        listener.close()
        raise UserError(
            f"rank 0 can listen at none of the ports {', '.join(map(str, ports(job)))}",
            "Set MASTER_PORT, the same for all ranks.",
        )
    listener.listen(ranks)

    def answer() -> None:
        told = 0
        with listener:
            while told < ranks:
                asker, _ = listener.accept()
                told += _answered(asker, job, port)

    threading.Thread(target=answer, name="lockstep-meeting", daemon=True).start()


def _answered(asker: socket.socket, job: str, port: int) -> bool:
    """True where somebody asked for this job, and was told."""
    try:
        with asker:
            asker.settimeout(_ASK_S)
            if asker.recv(_LINE) != job.encode():
                return False
            asker.sendall(str(port).encode())
            return True
    except OSError:  # it went away
        return False


def _ask(job: str, host: str, rank: int, size: int, seconds: float) -> int:
    """The port of the job's store. Who else listens at one of its ports says nothing, or something else."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for port in ports(job):
            try:
                with socket.create_connection((host, port), _ASK_S) as told:
                    told.sendall(job.encode())
                    answer = told.recv(_LINE)
            except OSError:
                continue
            if answer.isdigit():
                return int(answer)
        time.sleep(_PAUSE_S)
    raise UserError(
        f"rank {rank} of {size} did not find rank 0 at {host} in {seconds:g} s",
        "Check that the host's name is right and reachable (MASTER_ADDR names another), and that rank 0 was started.",
    )
