"""All-reduces for real, with a deadline, checked and timed."""

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lockstep.commands.doctor.children import Heard, Tell, run
from lockstep.commands.doctor.finding import Finding, fail, ok, warn

SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes
_REPEATS = {64 << 10: 20, 1 << 20: 10}
_FEW = 3  # of the larger ones
_LOOK_S = 0.02
_OVERTIME_S = 30.0  # that a backend's own deadline comes after ours, which knows more of the other ranks
_SAME_HOST_FLOOR = 50e6  # bytes/s of bus bandwidth at 16 MiB; a shared loopback has ten times that


@dataclass(frozen=True)
class Seat:
    """A rank's place in a group."""

    rank: int
    size: int
    backend: str
    device: str
    seconds: float
    found_in: str = ""  # the file that rank 0, which opens the store, writes its port to
    host: str = "127.0.0.1"  # of the store
    port: int = 0  # of it; 0: as the file says
    across: bool = False  # ranks on several hosts
    sizes: tuple[int, ...] = SIZES


def reduce(tell: Tell, seat: Seat) -> dict[int, list[float]]:
    """As a rank: meet the others, all-reduce each size, check the sums; seconds of each repetition by bytes.

    Raises:
        ArithmeticError: for a wrong sum.
    """
    import torch
    import torch.distributed as dist

    from lockstep.processes.rendezvous import choose_interface

    torch.set_num_threads(1)
    device = torch.device(seat.device)
    limit = timedelta(seconds=seat.seconds + _OVERTIME_S)
    tell(f"opening the store on {seat.host}" if seat.rank == 0 else f"looking for the store on {seat.host}")
    store = _store(seat, limit)
    if device.type != "cpu":
        tell(f"opening {seat.device}")
        torch.accelerator.set_device_index(device.index or 0)
        torch.zeros(1, device=device)
    if seat.across:
        choose_interface(store, seat.host, seat.rank, seat.size, os.environ)
    tell(f"meeting the other ranks over {seat.backend}")
    dist.init_process_group(seat.backend, store=store, rank=seat.rank, world_size=seat.size, timeout=limit)
    times = {}
    for nbytes in seat.sizes:
        tell(f"in an all-reduce of {nbytes >> 10} KiB over {seat.backend}")
        pattern = torch.arange(nbytes // 4, device=device).remainder_(1009).float()  # exact in any order of adding
        tensor = pattern * (seat.rank + 1)
        dist.all_reduce(tensor)
        expected = pattern * (seat.size * (seat.size + 1) // 2)
        if wrong := int((tensor != expected).sum()):
            raise ArithmeticError(f"{wrong} of {tensor.numel()} sums are wrong after an all-reduce of {nbytes} bytes")
        times[nbytes] = [_timed(tensor, seat) for _ in range(_REPEATS.get(nbytes, _FEW))]
    tell("done")
    _together(tensor, seat)
    return times


def _store(seat: Seat, limit: timedelta) -> Any:
    from torch._C._distributed_c10d import TCPStore

    if seat.rank > 0:
        number = seat.port or told_port(seat.found_in, limit.total_seconds())
        return TCPStore(seat.host, number, seat.size, is_master=False, wait_for_workers=False, timeout=limit)
    store = TCPStore(seat.host, 0, seat.size, is_master=True, wait_for_workers=False, timeout=limit)
    part = Path(f"{seat.found_in}.part")
    part.write_text(str(store.port))
    part.rename(seat.found_in)
    return store


def told_port(file: str, seconds: float) -> int:
    """The port that rank 0 writes to a file when its store is open.

    Raises:
        TimeoutError: where it did not in so many seconds.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if Path(file).exists():
            return int(Path(file).read_text())
        time.sleep(_LOOK_S)
    raise TimeoutError(f"rank 0 opened no store in {seconds:g} s")


def _timed(tensor: Any, seat: Seat) -> float:
    """Seconds of an all-reduce from a common start."""
    import torch.distributed as dist

    tensor.zero_()
    _together(tensor, seat)
    began = time.perf_counter()
    dist.all_reduce(tensor)
    _settle(tensor)
    return time.perf_counter() - began


def _together(tensor: Any, seat: Seat) -> None:
    """Wait for all ranks."""
    import torch.distributed as dist

    dist.barrier(device_ids=[tensor.device.index] if seat.backend == "nccl" else None)
    _settle(tensor)


def _settle(tensor: Any) -> None:
    import torch

    if tensor.device.type != "cpu":
        torch.accelerator.synchronize()


def bus_bandwidth(ranks: Sequence[Mapping[int, list[float]]], size: int) -> dict[int, float]:
    """Bytes/s of each bus by bytes reduced: 2 (N - 1) / N * bytes / time, with the median of the slowest rank's time.

    The formula is nccl-tests' (doc/PERFORMANCE.md): what each rank must send in any all-reduce, so that the figure
    can be compared with a link's rate whatever N is.
    """
    from lockstep.commands.forecast.model import moved

    slowest = {nbytes: [max(at) for at in zip(*(rank[nbytes] for rank in ranks), strict=True)] for nbytes in ranks[0]}
    return {nbytes: moved(size, nbytes) / statistics.median(times) for nbytes, times in slowest.items()}


def group(seats: Sequence[Seat], environ: Mapping[str, str] = os.environ, **how: Any) -> list[Heard]:
    """Start the ranks of these seats on this host; rank 0 opens the store."""
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as folder:
        calls = [(reduce, (replace(seat, found_in=str(Path(folder, "port"))),)) for seat in seats]
        return run(calls, seats[0].seconds, environ, **how)


def seats(backend: str, devices: Sequence[str], seconds: float, sizes: tuple[int, ...] = SIZES) -> list[Seat]:
    """A group on this host, a rank for each device."""
    return [Seat(rank, len(devices), backend, each, seconds, sizes=sizes) for rank, each in enumerate(devices)]


def story(heard: Sequence[Heard], seconds: float, first: int = 0) -> str:
    """Why a group failed, in one line: a rank's own error, or who stood still where. `first`: the first one's rank."""
    if failed := [(rank, one) for rank, one in enumerate(heard, first) if one.error]:
        # who only lost its peer says less than who failed
        rank, one = min(failed, key=lambda pair: any(sign in pair[1].error for sign in ("closed by peer", "reset by")))
        warned = [line for line in one.log.splitlines() if "NCCL WARN" in line]
        more = f" ({warned[-1].partition('NCCL WARN')[2].strip()})" if warned else ""
        return f"rank {rank}, {one.stage}: {one.error}{more}"
    still = [
        f"rank {rank} (pid {one.pid}) {one.stage}" + (f", {one.state}" if one.state else "")
        for rank, one in enumerate(heard, first)
        if not one.ended
    ]
    return f"no end in {seconds:g} s: {'; '.join(still)}"


def remedy_for(backend: str, heard: Sequence[Heard], environ: Mapping[str, str] = os.environ) -> str:
    """What to do about a group that failed."""
    text = " ".join(f"{one.error} {one.log} {one.state}" for one in heard)
    if "stopped by a signal" in text:
        return "Continue the process (kill -CONT), or find what stops it: a debugger, a batch system, Ctrl-Z."
    if "Unable to find address for" in text or "no socket interface found" in text.lower():
        name = f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
        return f"Unset {name} ({environ.get(name, '')}), or name an interface that is up."
    if "out of memory" in text.lower():
        return "Free the device's memory (nvidia-smi shows who holds it), or use another by --gpus."
    if backend == "nccl":
        return "Run again with NCCL_DEBUG=INFO for NCCL's own story; check nvidia-smi and `dmesg | grep -i xid`."
    return "Check a firewall on the loopback, /etc/hosts' line for this host's name, and GLOO_SOCKET_IFNAME."


def judged(
    check: str, where: str, size: int, heard: Sequence[Heard], seconds: float, remedy: str, first: int = 0
) -> Finding:
    """The finding of a group, or of its ranks from `first` on: its bandwidths, or why there are none."""
    if not all(one.well for one in heard):
        return fail(check, f"{where}: {story(heard, seconds, first)}", remedy)
    times = [one.value for one in heard]
    if size == 1:
        return ok(check, f"{where}: right sums, in a group of one; nobody to measure a bandwidth with")
    rates = bus_bandwidth(times, size)
    shown = ", ".join(f"{_size(nbytes)} {rate / 1e9:.2f}" for nbytes, rate in rates.items())
    numbers = {f"bus_gb_per_s_{nbytes}": round(rate / 1e9, 4) for nbytes, rate in rates.items()}
    message = f"{where}: right sums; bus bandwidth in GB/s: {shown}"
    if max(rates.values()) < _SAME_HOST_FLOOR:
        return warn(check, message, "Slow for one host: see that nothing else computes, and try again.", **numbers)
    return ok(check, message, **numbers)


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def on_host(
    seconds: float, environ: Mapping[str, str] = os.environ, sizes: tuple[int, ...] = SIZES, **how: Any
) -> Finding:
    """Two ranks on the CPU, over gloo."""
    heard = group(seats("gloo", ("cpu", "cpu"), seconds, sizes), environ, **how)
    return judged("gloo", "2 ranks", 2, heard, seconds, remedy_for("gloo", heard, environ))
