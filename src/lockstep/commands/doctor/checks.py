"""The checks in their order."""

import os
import socket
from collections.abc import Callable, Iterator

import psutil

from lockstep.commands.doctor import (
    children,
    collectives,
    devices,
    host,
    launchers,
    machine,
    master,
    network,
    pairs,
    storage,
)
from lockstep.commands.doctor.finding import Finding
from lockstep.commands.doctor.listen import listen
from lockstep.commands.doctor.machine import Machine
from lockstep.commands.doctor.plan import Plan
from lockstep.processes import proc
from lockstep.processes.network import interfaces

Say = Callable[[str], None]
_LISTENING = "listening at port {} for {:g} s: on the others `lockstep doctor --master-addr {} --master-port {}`"
_OF_DEVICES = ("launcher", "devices", "host", "master", "collectives")  # parts that need to know them


def doctor(plan: Plan, log: Say, show: Callable[[Finding], None]) -> list[Finding]:
    """Check what the plan wants; returns the findings.

    Args:
        plan: the parts, and the run that they are for.
        say: is told before what takes more than a moment.
        show: is given each finding when it is there.
    """
    found: list[Finding] = []

    def take(finding: Finding) -> None:
        found.append(finding)
        show(finding)

    for finding in _findings(plan, log, take):
        take(finding)
    return found


def _findings(plan: Plan, log: Say, take: Callable[[Finding], None]) -> Iterator[Finding]:
    seen = None
    if any(map(plan.wants, _OF_DEVICES)):
        children.prepare()
        log("looking at torch and the devices")
        seen, heard = machine.look(plan.timeout, plan.device)
        if seen is None:
            yield devices.unseen(heard, plan.timeout)
        elif plan.wants("devices"):
            yield from devices.agreement(seen)
            yield from devices.computing(seen, plan.device)
    yield from _host(plan, seen.count if seen is not None else 0)
    if plan.wants("network"):
        yield network.host_name(plan.nnodes, plan.timeout, socket.gethostname())
        yield from network.interface(interfaces())
        yield network.port(0 if plan.master_addr else plan.master_port, plan.timeout)
    if plan.wants("collectives"):
        log("all-reduces between two processes over gloo")
        yield collectives.on_host(plan.timeout)
        if seen is not None and seen.count and seen.backend not in ("", "gloo"):
            log(f"all-reduces between {seen.count} device(s) over {seen.backend}")
            yield from pairs.between(seen.backend, seen.kind, seen.count, plan.timeout, os.environ)
    yield from _others(plan, log, take, seen)


def _host(plan: Plan, gpus: int) -> Iterator[Finding]:
    """What needs no other process."""
    if plan.wants("launcher"):
        from lockstep.processes.devices import cores  # with torch

        yield launchers.launcher()
        yield from launchers.slurm(os.environ, gpus, cores())
    if plan.wants("host"):
        from lockstep.processes.devices import cores

        usable = cores()
        count, quota, got = plan.processes(usable, gpus), proc.cpu_quota(), host.cores_got(usable)
        yield from host.cores(usable, quota, got, count, plan.threads, plan.workers)
        yield host.memory(count, psutil.virtual_memory().available, proc.memory_left())
        yield host.shm(plan.workers)
        yield host.open_files()
    if plan.wants("storage"):
        yield from storage.checks(plan)


def _others(plan: Plan, log: Say, take: Callable[[Finding], None], seen: Machine | None) -> Iterator[Finding]:
    """The other machines: machine 0 from here, or here as machine 0."""
    mine = seen.versions if seen is not None else {}
    if plan.master_addr and plan.wants("master"):
        log(f"going to {plan.master_addr}:{plan.master_port}")
        finding, connection = master.reach(plan.master_addr, plan.master_port, plan.timeout, interfaces())
        yield finding
        if connection is not None:
            interface = finding.numbers.get("interface", "lo")
            with connection:
                yield from master.talk(connection, plan.master_addr, interface, plan.timeout, mine)
    if plan.listen:
        log(_LISTENING.format(plan.master_port, plan.listen, network.own_address(), plan.master_port))
        listen(plan.master_port, plan.nnodes, plan.listen, plan.timeout, mine, take)
