"""All-reduces for real, with a deadline, checked and timed: of two processes, of every pair of GPUs, of all of them."""

import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from lockstep.commands.doctor.children import Child, Report, run
from lockstep.commands.doctor.devices import Machine
from lockstep.commands.doctor.finding import Finding, graded
from lockstep.commands.doctor.network import is_loopback

LOOPBACK = "127.0.0.1"
SIZES = (64 << 10, 1 << 20, 16 << 20)  # bytes
_REPEATS = {64 << 10: 20, 1 << 20: 10}
_FEW = 3  # of the larger ones
_OVERTIME_S = 30.0  # that a backend's own deadline comes after ours, which knows more of the other ranks
_SAME_HOST_FLOOR = 0.05  # GB/s of bus bandwidth at 16 MiB; a shared loopback has ten times that

_CURES = {
    "NCCL_P2P_DISABLE": "Copies between the two GPUs get lost on the way, mostly by PCIe ACS or an IOMMU: turn ACS off "
    "in the BIOS (or setpci), or boot with iommu=pt, and peer-to-peer is back.",
    "NCCL_SHM_DISABLE": "Shared memory between the processes fails: a larger /dev/shm, or --ipc=host, and it is back.",
}


@dataclass(frozen=True)
class Group:
    """Ranks that all-reduce together, and where they meet."""

    backend: str
    size: int
    seconds: float
    port: int  # of the store
    host: str = LOOPBACK  # address of the store; another one: the ranks are on several hosts
    sizes: tuple[int, ...] = field(default_factory=lambda: SIZES)  # bytes
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def all_reduce(
    report: Report, group: Group, rank: int, device_name: str, listener: socket.socket | None = None
) -> dict[int, float]:
    """As a rank: meet the others, all-reduce each size, check the sums; the slowest rank's median seconds by bytes.

    `listener` is rank 0's, bound to the group's port: it opens the store there.

    Raises:
        ArithmeticError: for a wrong sum.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import TCPStore

    from lockstep.processes.rendezvous import choose_interface

    torch.set_num_threads(1)
    device, limit = torch.device(device_name), timedelta(seconds=group.seconds + _OVERTIME_S)

    def settle() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    def timed(tensor: torch.Tensor) -> float:
        dist.barrier(device_ids=[device.index] if group.backend == "nccl" else None)
        settle()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        settle()
        return time.perf_counter() - began

    report(f"{'opening' if listener else 'looking for'} the store on {group.host}")
    handle = listener.detach() if listener else None
    store = TCPStore(
        group.host, group.port, group.size, rank == 0, limit, wait_for_workers=False, master_listen_fd=handle
    )
    if device.type != "cpu":
        report(f"opening {device}")
        torch.accelerator.set_device_index(device.index or 0)
        torch.zeros(1, device=device)
    if not is_loopback(group.host):
        choose_interface(store, group.host, rank, group.size, os.environ)
    report(f"meeting the other ranks over {group.backend}")
    dist.init_process_group(group.backend, store=store, rank=rank, world_size=group.size, timeout=limit)
    medians = {}
    for nbytes in group.sizes:
        report(f"in an all-reduce of {nbytes >> 10} KiB over {group.backend}")
        pattern = torch.arange(nbytes // 4, device=device).remainder_(1009).float()  # exact in any order of adding
        tensor = pattern * (rank + 1)
        dist.all_reduce(tensor)
        expected = pattern * (group.size * (group.size + 1) // 2)
        if wrong := int((tensor != expected).sum()):
            raise ArithmeticError(f"{wrong} of {tensor.numel()} sums are wrong after an all-reduce of {nbytes} bytes")
        times = torch.tensor([timed(tensor.zero_()) for _ in range(_REPEATS.get(nbytes, _FEW))], device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        medians[nbytes] = times.median().item()
    return medians


def on_host(
    backend: str, devices: Sequence[str], seconds: float, environ: Mapping[str, str] = os.environ
) -> tuple[Group, list[Child]]:
    """Let ranks on this host all-reduce, one for each device."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        group = Group(backend, len(devices), seconds, listener.getsockname()[1], environ=dict(environ))
        calls = [(all_reduce, group, rank, name, None if rank else listener) for rank, name in enumerate(devices)]
        return group, run(calls, seconds, environ)


def outcome(check: str, where: str, group: Group, ranks: Sequence[Child], remedy: str = "", first: int = 0) -> Finding:
    """The finding of a group: its bandwidths, or why there are none. `first`: number of the first of these ranks.

    Bus bandwidth is 2 (N - 1) / N * bytes / time, as nccl-tests' doc/PERFORMANCE.md has it: what each rank must send
    in any all-reduce, so that the figure can be compared with a link's rate whatever N is.
    """
    from lockstep.commands.forecast.model import moved

    if not all(rank.well for rank in ranks):
        message = f"{where}: {_reason(ranks, group.seconds, first)}"
        return Finding(check, "fail", message, remedy or remedy_for(group, ranks))
    if group.size == 1:
        message = f"{where}: right sums, in a group of one; nobody to measure a bandwidth with"
        return Finding(check, "ok", message)
    rates = {nbytes: moved(group.size, nbytes) / median / 1e9 for nbytes, median in ranks[0].value.items()}
    names = [f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB" for nbytes in rates]
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in zip(names, rates.values(), strict=True))
    message = f"{where}: right sums; bus bandwidth in GB/s: {shown}"
    numbers = {f"bus_gb_per_s_{nbytes}": round(rate, 4) for nbytes, rate in rates.items()}
    slow = "Slow for one host: see that nothing else computes, and try again."
    return graded(check, message, numbers, (max(rates.values()) < _SAME_HOST_FLOOR, "warn", slow))


def _reason(ranks: Sequence[Child], seconds: float, first: int) -> str:
    """In one line: a rank's own error, or who stood still where."""
    numbered = list(enumerate(ranks, first))
    if failed := [(number, rank) for number, rank in numbered if rank.error]:
        # who only lost its peer says less than who failed
        number, rank = min(failed, key=lambda pair: any(s in pair[1].error for s in ("closed by peer", "reset by")))
        warned = [line.partition("NCCL WARN")[2].strip() for line in rank.log.splitlines() if "NCCL WARN" in line]
        more = f" ({warned[-1]})" if warned else ""
        return f"rank {number}, {rank.stage}: {rank.error}{more}"
    still = "; ".join(f"rank {number} (pid {rank.pid}) {rank.place}" for number, rank in numbered if not rank.well)
    return f"no end in {seconds:g} s: {still}"


def remedy_for(group: Group, ranks: Sequence[Child]) -> str:
    """What to do about a group that failed."""
    text = " ".join(f"{rank.error} {rank.log} {rank.state}" for rank in ranks)
    if "stopped by a signal" in text:
        return "Continue the process (kill -CONT), or find what stops it: a debugger, a batch system, Ctrl-Z."
    if "Unable to find address for" in text or "no socket interface found" in text.lower():
        name = f"{'NCCL' if group.backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
        return f"Unset {name} ({group.environ.get(name, '')}), or name an interface that is up."
    if "out of memory" in text.lower():
        return "Free the device's memory (nvidia-smi shows who holds it), or use another by --gpus."
    if group.backend == "nccl":
        return "Run again with NCCL_DEBUG=INFO for NCCL's own story; check nvidia-smi and `dmesg | grep -i xid`."
    return "Check a firewall on the loopback, /etc/hosts' line for this host's name, and GLOO_SOCKET_IFNAME."


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of so many things, as rounds in which each thing is in one pair at most (the circle method)."""
    ring = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def between(machine: Machine, seconds: float) -> Iterator[Finding]:
    """The backend of this machine's devices: a group of one, or every pair and then all of them together.

    Pairs without a device in common run at once: eight GPUs take seven rounds, not 28.
    """
    backend, names = machine.backend, [f"{machine.kind}:{index}" for index in range(machine.count)]
    if len(names) == 1:
        yield outcome(backend, names[0], *on_host(backend, names, seconds))
        return
    well = True
    for pairs in rounds(len(names)):
        with ThreadPoolExecutor(len(pairs)) as pool:
            for finding in pool.map(lambda pair: two(machine, pair, seconds), pairs):
                well = well and finding.status != "fail"
                yield finding
    if len(names) > 2 and well:
        yield outcome(f"{backend} all", f"{len(names)} ranks", *on_host(backend, names, seconds))


def two(machine: Machine, pair: tuple[int, int], seconds: float, environ: Mapping[str, str] = os.environ) -> Finding:
    """Two devices; where that fails over NCCL, again without peer-to-peer copies, then without shared memory."""
    backend, names, remedy = machine.backend, [f"{machine.kind}:{index}" for index in pair], ""
    group, ranks = on_host(backend, names, seconds, environ)
    if backend == "nccl" and not all(rank.well for rank in ranks):
        for name in [name for name in _CURES if name not in environ]:
            if all(rank.well for rank in on_host(backend, names, seconds, {**environ, name: "1"})[1]):
                remedy = f"With {name}=1 it works: set that for the run. {_CURES[name]}"
                break
    return outcome(f"{backend} {pair[0]}-{pair[1]}", " and ".join(names), group, ranks, remedy)
