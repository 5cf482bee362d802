"""The checks in their order."""

import os
import socket
from collections.abc import Callable, Iterator

import psutil

from lockstep.commands.doctor import children, devices, host, launchers, master, network, storage
from lockstep.commands.doctor.collectives import between, on_host, outcome
from lockstep.commands.doctor.devices import Machine
from lockstep.commands.doctor.finding import Finding
from lockstep.commands.doctor.listen import listen
from lockstep.commands.doctor.plan import PARTS, Plan
from lockstep.processes import proc
from lockstep.processes.network import interfaces

_LISTENING = "listening at port {} for {:g} s: on the others `lockstep doctor --master-addr {} --master-port {}`"


def findings(plan: Plan, log: Callable[[str], None]) -> Iterator[Finding]:
    """Check what the plan wants. `log` is given a line before what takes more than a moment."""
    machine, usable = Machine(), proc.cores()
    if any(plan.wants(part) for part in PARTS if part not in ("storage", "network")):
        log("looking at torch and the devices")
        (child,) = children.run([(devices.look, plan.device)], plan.timeout)
        machine = child.value or machine
        if not child.well:
            yield devices.unseen(child, plan.timeout)
        elif plan.wants("devices"):
            yield from devices.agreement(machine)
            yield from devices.computing(machine, plan.device)
    if plan.wants("launcher"):
        yield launchers.launcher()
        yield from launchers.slurm(os.environ, machine.count, usable)
    if plan.wants("host"):
        count = plan.processes(usable, machine.count)
        yield from host.cores(plan, count, usable, proc.cpu_quota(), host.cores_got(usable))
        yield host.memory(count, psutil.virtual_memory().available, proc.memory_left())
        yield host.shm(plan.workers)
        yield host.open_files()
    if plan.wants("storage"):
        yield from storage.checks(plan)
    if plan.wants("network"):
        yield network.host_name(plan.nnodes, plan.timeout, socket.gethostname())
        yield from network.interface(interfaces())
        yield network.port(0 if plan.master_addr else plan.master_port, plan.timeout)
        yield network.listening(plan.nnodes, plan.master_addr)
    if plan.wants("collectives"):
        log("all-reduces between two processes over gloo")
        yield outcome("gloo", "2 ranks", *on_host("gloo", ("cpu", "cpu"), plan.timeout))
        if machine.count and machine.backend not in ("", "gloo"):
            log(f"all-reduces between {machine.count} device(s) over {machine.backend}")
            yield from between(machine, plan.timeout)
    if plan.master_addr and plan.wants("master"):
        log(f"going to {plan.master_addr}:{plan.master_port}")
        yield from master.visit(plan.master_addr, plan.master_port, plan.timeout, machine.versions)
    if plan.listen:
        log(_LISTENING.format(plan.master_port, plan.listen, network.own_address(), plan.master_port))
        yield from listen(plan, machine.versions)
