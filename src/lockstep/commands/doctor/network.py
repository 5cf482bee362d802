"""Names, interfaces and ports, and all-reduces for real: between processes, GPUs and machines, checked and timed."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from ipaddress import ip_address

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from lockstep.commands.doctor.children import Child, run
from lockstep.commands.doctor.machine import Machine
from lockstep.commands.doctor.plan import Finding, Plan, graded
from lockstep.distributed.proc import listener_at
from lockstep.distributed.rendezvous import (
    LOOPBACK,
    choose_interface,
    different,
    interface_of,
    interfaces,
    listen_at,
    serve,
    versions,
)

MEET_S = 300.0  # that machines wait for each other: they are started by hand
SIZES = {64 << 10: 20, 1 << 20: 10, 16 << 20: 3}  # bytes -> all-reduces that are timed
_OVERTIME_S = 30.0  # that a backend's own deadline comes after ours, which knows more of the other ranks
_PAUSE_S, _CLOCK_OFF_S = 0.2, 1.0
_CURES = {
    "NCCL_P2P_DISABLE": "Copies between GPUs get lost, mostly by PCIe ACS or an IOMMU: turn ACS off in the BIOS.",
    "NCCL_SHM_DISABLE": "Shared memory between the processes fails: a larger /dev/shm, or --ipc=host, mends it.",
}


def local(plan: Plan) -> Iterator[str | Finding]:
    """This host's name, its interfaces, and the port that a run would listen at."""
    name = socket.gethostname()
    yield f"looking up {name}"
    yield host_name(name, plan.nnodes > 1)
    yield up(interfaces())
    yield port(plan.master_port if plan.node_rank == 0 else 0)


def _loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def host_name(name: str, several: bool) -> Finding:
    """Does this host's own name have an address, and one for the others to use?

    A run needs none: it names gloo the interface to machine 0. torchrun's elastic rendezvous gives the name to others.
    """
    remedy = f"A line `ADDRESS {name}` in /etc/hosts or in the name server; with torchrun --local-addr ADDRESS."
    try:
        addresses = list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))
    except OSError as error:
        return Finding("host name", "fail" if several else "warn", f"{name} has no address ({error.strerror})", remedy)
    lost = several and all(map(_loopback, addresses))
    return graded("host name", f"{name} is {', '.join(addresses)}", (lost, "warn", remedy))


def up(found: Mapping[str, Sequence[str]]) -> Finding:
    """Which interfaces are up."""
    usable = {name: addresses for name, addresses in found.items() if addresses}
    loopback = [any(map(_loopback, addresses)) for addresses in usable.values()]
    return graded(
        "interfaces",
        "; ".join(f"{name} {addresses[0]}" for name, addresses in usable.items()) or "none has an address",
        (not any(loopback), "fail", "`ip link set lo up`."),
        (all(loopback), "warn", "Fine for one machine; else bring one up."),
    )


def port(number: int) -> Finding:
    """A rendezvous on this host itself: bind the port (0: any), and connect by loopback."""
    name = f"port {number}" if number else "a free port"
    try:
        with socket.create_server(("", number)) as listener:
            own = listener.getsockname()[1]
            with socket.create_connection((LOOPBACK, own), 5.0):
                return Finding("port", "ok", f"{name}: opened, and reached by {LOOPBACK}")
    except OSError as error:
        holder = listener_at(number)
        remedy = f"End {holder or 'what listens there'}, or name another by --master-port; the loopback has to be up."
        reason = os.strerror(error.errno) if error.errno else str(error)
        return Finding("port", "fail", f"{name}: {reason}{f', by {holder}' if holder else ''}", remedy)


def all_reduce(backend: str, rank: int, devices: Sequence[str], number: int, seconds: float) -> Iterator[object]:
    """As a rank of this host, with the store at a port of the loopback: what `timed` yields."""
    torch.set_num_threads(1)
    device, limit = torch.device(devices[rank]), timedelta(seconds=seconds + _OVERTIME_S)
    yield f"opening {device}"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
        torch.zeros(1, device=device)
    yield f"meeting the other ranks over {backend}"
    store = TCPStore(LOOPBACK, number, len(devices), False, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=len(devices), timeout=limit)
    yield from timed(rank, len(devices), device)


def timed(rank: int, size: int, device: torch.device) -> Iterator[str | tuple[int, float]]:
    """All-reduce each size: bytes, and the slowest rank's median seconds. Raises ArithmeticError for a wrong sum."""
    for nbytes, repeats in SIZES.items():
        yield f"in an all-reduce of {nbytes >> 10} KiB"
        pattern = torch.arange(nbytes // 4, device=device).remainder_(1009).float()  # exact in any order of adding
        tensor = pattern * (rank + 1)
        dist.all_reduce(tensor)
        if wrong := int((tensor != pattern * (size * (size + 1) // 2)).sum()):
            raise ArithmeticError(f"{wrong} of {tensor.numel()} sums are wrong after an all-reduce of {nbytes} bytes")
        times = torch.zeros(repeats, device=device)
        for place in range(repeats):
            dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
            began = time.perf_counter()
            dist.all_reduce(tensor.zero_())
            float(tensor[0])  # waits for the device
            times[place] = time.perf_counter() - began
        dist.all_reduce(times, dist.ReduceOp.MAX)
        yield nbytes, times.median().item()


def group(backend: str, devices: Sequence[str], seconds: float, environ: Mapping[str, str]) -> list[Child]:
    """Ranks of this host that all-reduce, one for each device."""
    store = serve(listen_at(LOOPBACK, 0), len(devices), timedelta(seconds=seconds + _OVERTIME_S))
    calls = [(all_reduce, backend, rank, devices, store.port, seconds) for rank in range(len(devices))]
    return run(calls, seconds, environ)


def on_host(machine: Machine, seconds: float, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Two processes over gloo, and all devices over their own backend.

    Where NCCL fails, again without peer-to-peer copies, then without shared memory: the remedy names what helps.
    """
    yield outcome("gloo", group("gloo", ("cpu", "cpu"), seconds, environ), seconds)
    devices, remedy = [f"{machine.kind}:{index}" for index in range(len(machine.names))], ""
    if not devices or machine.backend == "gloo":
        return
    ranks = group(machine.backend, devices, seconds, environ)
    for name, why in _CURES.items() if machine.backend == "nccl" else ():
        if not (remedy or all(rank.done for rank in ranks)):
            again = group(machine.backend, devices, seconds, {**environ, name: "1"})
            remedy = f"With {name}=1 it works: set that. {why}" if all(rank.done for rank in again) else ""
    yield outcome(machine.backend, ranks, seconds, remedy)


def outcome(backend: str, ranks: Sequence[Child], seconds: float, remedy: str = "") -> Finding:
    """The finding of a group: its bandwidths, or who failed or stood still where."""
    if all(rank.done for rank in ranks):
        return bandwidths(backend, f"{len(ranks)} rank(s)", len(ranks), dict(ranks[0].values))
    still = [f"rank {k} (pid {rank.process.pid}) {rank.stage}" for k, rank in enumerate(ranks) if not rank.done]
    reason = f"no end in {seconds:g} s: {'; '.join(still)}"
    if failed := [(k, rank) for k, rank in enumerate(ranks) if rank.error]:
        # who only lost its peer says less than who failed
        k, rank = min(failed, key=lambda pair: any(s in pair[1].error for s in ("closed by peer", "reset by")))
        reason = f"rank {k}, {rank.stage}: {rank.error}"
    cases = {
        "stopped by a signal": "Continue the process (kill -CONT), or find what stops it: a debugger, Ctrl-Z.",
        "Unable to find address for": "Unset GLOO_SOCKET_IFNAME, or name an interface that is up.",
        "no socket interface found": "Unset NCCL_SOCKET_IFNAME, or name an interface that is up.",
        "": remedy or "Check firewalls, the loopback and /etc/hosts; with NCCL_DEBUG=INFO NCCL says more.",
    }
    return Finding(backend, "fail", reason, next(cure for sign, cure in cases.items() if sign in reason))


def bandwidths(check: str, where: str, size: int, medians: Mapping[int, float]) -> Finding:
    """Bus bandwidth is 2 (N - 1) / N * bytes / time, as nccl-tests' doc/PERFORMANCE.md has it.

    That is what each rank must send in any all-reduce, so it can be compared with a link's rate whatever N is.
    """
    rates = {nbytes: 2 * (size - 1) / size * nbytes / seconds / 1e9 for nbytes, seconds in medians.items()}
    shown = ", ".join(f"{nbytes >> 10:,} KiB {rate:.2f}" for nbytes, rate in rates.items())
    return Finding(check, "ok", f"{where}: right sums; bus bandwidth in GB/s: {shown}")


def machines(plan: Plan) -> Iterator[object]:
    """Meet the doctors of the other machines as a run would, and compare versions, clocks and sums with them."""
    host, size, me, limit = plan.master_addr, plan.nnodes, plan.node_rank, timedelta(seconds=MEET_S)
    if me > 0:
        yield (found := reach(host, plan.master_port))
        if found.status == "fail":
            return
        yield "joining the store of machine 0"
        store = TCPStore(host, plan.master_port, size, False, limit)
    else:
        store = serve(listen_at(host, plan.master_port), size, limit)
    store.set(f"machine/{me}", json.dumps(versions()))
    for other in range(size):
        yield f"waiting for machine {other}"
        store.wait([f"machine/{other}"], limit)
    names = [f"machine {other}" for other in range(size)]
    error = different([json.loads(store.get(name.replace(" ", "/"))) for name in names], names)
    message = error.message.partition(": ")[2] if error else f"the same on {size} machines"
    yield graded("versions", message, (error is not None, "fail", "Install the same everywhere: bits differ."))
    choose_interface(store, host, me, size, os.environ)
    yield f"meeting the others over gloo by {os.environ.get('GLOO_SOCKET_IFNAME', 'the default interface')}"
    dist.init_process_group("gloo", store=store, rank=me, world_size=size, timeout=timedelta(seconds=plan.timeout))
    dist.barrier()
    moments = torch.zeros(size, dtype=torch.int64)
    moments[me] = time.time_ns()
    dist.all_reduce(moments)
    ahead = (moments[0] - moments[me]).item() / 1e9  # as near as processes leave a barrier together
    remedy = "`timedatectl set-ntp true` (or chrony) on both: the records' times could not be compared."
    yield graded("clock", f"machine 0's is {ahead:+.2f} s ahead", (abs(ahead) > _CLOCK_OFF_S, "warn", remedy))
    medians: dict[int, float] = {}
    for said in timed(me, size, torch.device("cpu")):
        if isinstance(said, str):
            yield said
        else:
            medians[said[0]] = said[1]
    yield bandwidths("gloo to machines", f"{size} machines", size, medians)
    dist.barrier()  # machine 0 has the store


def reach(host: str, number: int, seconds: float = MEET_S) -> Finding:
    """The way to machine 0: its name, and its port, at which nobody may listen yet."""
    place, until = f"{host}:{number}", time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, number), 10.0) as connection:
                own = connection.getsockname()[0]
            lost = _loopback(own) and host not in (LOOPBACK, "::1", "localhost")
            remedy = "The name leads to the loopback, where each machine is itself: give the address."
            message = f"{place}: connected from {own} by {interface_of(own) or '?'}"
            return graded("machine 0", message, (lost, "warn", remedy))
        except ConnectionRefusedError:
            message, remedy = (
                "refused: nothing listens there",
                "Start doctor there too; a firewall that rejects looks so.",
            )
            if time.monotonic() < until:
                time.sleep(_PAUSE_S)
                continue
        except TimeoutError:
            message = "no answer: packets are dropped on the way, or nobody has this address"
            remedy = "Check the address, then open the port in both hosts' and the cloud's firewalls."
        except OSError as error:
            message = str(error.strerror or error)
            remedy = "Check the name (/etc/hosts, /etc/resolv.conf) and the route (`ip route get ADDRESS`)."
        return Finding("machine 0", "fail", f"{place}: {message}", remedy)
