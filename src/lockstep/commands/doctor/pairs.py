"""All-reduces between every pair of GPUs, and by another way where one does not come to its end."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from lockstep.commands.doctor.collectives import Start, on_host, outcome, remedy_for, trial
from lockstep.commands.doctor.finding import Finding

_CURES = {
    "NCCL_P2P_DISABLE": "Copies between the two GPUs get lost on the way, mostly by PCIe ACS or an IOMMU: turn ACS off "
    "in the BIOS (or setpci), or boot with iommu=pt, and peer-to-peer is back.",
    "NCCL_SHM_DISABLE": "Shared memory between the processes fails: a larger /dev/shm, or --ipc=host, and it is back.",
}


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


def between(
    backend: str, kind: str, count: int, seconds: float, environ: Mapping[str, str], start: Start = on_host
) -> Iterator[Finding]:
    """The backend of a kind of device: a group of one, or every pair and then all of them together.

    Pairs without a device in common run at once: eight GPUs take seven rounds, not 28.
    """
    names = [f"{kind}:{index}" for index in range(count)]
    if count == 1:
        yield trial(backend, names[0], backend, names, seconds, environ, start)
        return
    well = True
    for pairs in rounds(count):
        with ThreadPoolExecutor(len(pairs)) as pool:
            for finding in pool.map(lambda devices: pair(backend, kind, devices, seconds, environ, start), pairs):
                well = well and finding.status != "fail"
                yield finding
    if count > 2 and well:
        yield trial(f"{backend} all", f"{count} ranks", backend, names, seconds, environ, start)


def pair(
    backend: str, kind: str, devices: tuple[int, int], seconds: float, environ: Mapping[str, str], start: Start
) -> Finding:
    """Two devices; where that fails over NCCL, again without peer-to-peer copies, then without shared memory."""
    names = [f"{kind}:{each}" for each in devices]
    ranks = start(backend, names, seconds, environ)
    remedy = remedy_for(backend, ranks, environ)
    if backend == "nccl" and not all(rank.well for rank in ranks):
        for name, cure in _CURES.items():
            if name not in environ and all(
                rank.well for rank in start(backend, names, seconds, {**environ, name: "1"})
            ):
                remedy = f"With {name}=1 it works: set that for the run. {cure}"
                break
    return outcome(f"{backend} {devices[0]}-{devices[1]}", " and ".join(names), 2, ranks, seconds, remedy)
