"""`lockstep doctor`: try what a run needs from this machine and the others, and say what to do about the rest."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from lockstep.commands.doctor.children import run
from lockstep.commands.doctor.plan import PARTS, Finding, Plan
from lockstep.commands.shared.arguments import parse, print_error
from lockstep.config.fields import require
from lockstep.errors import EXIT_FAILURE

_HANGS = {  # part -> what to do where it does not come to its end
    "devices": "A driver or device hangs: see `nvidia-smi` and `dmesg | grep -i xid`; --device cpu leaves it alone.",
    "storage": "Its file server does not answer, or is overloaded: check the mount, or name another folder.",
    "network": "A name server does not answer: check /etc/resolv.conf and /etc/hosts.",
    "machines": "Open all ports between them; GLOO_SOCKET_IFNAME, if set, has to name the interface between them.",
}


def main(args: list[str]) -> int:
    """Try what a run needs from this machine and the network."""
    about = (
        "Try what a run needs: all-reduces between processes, GPUs and machines, ports, names, disk, memory, cores; "
        "each with a deadline. Exit code 1: a check failed (a warning does not)."
    )
    names, plan = parse(Plan(), args, about)
    message = f"doctor takes flags alone, got {' '.join(names)}"
    require(not names, message, "Values follow a flag: --only host,network.")
    found = list[Finding]()
    for each in findings(plan):
        found.append(each)
        if not plan.json:
            print(f"{each.status:<8}{each.check:<18} {each.message}", flush=True)
            if each.remedy:
                print(f"{'':<26} -> {each.remedy}", flush=True)
    counts = Counter(finding.status for finding in found)
    if plan.json:
        print(json.dumps({"healthy": not counts["fail"], "findings": [asdict(each) for each in found]}, indent=2))
    else:
        print(f"{counts['ok']} ok, {counts['warn']} warning(s), {counts['fail']} failure(s)")
    return EXIT_FAILURE if counts["fail"] else 0


def findings(plan: Plan) -> Iterator[Finding]:
    """Check what the plan wants, each part in a process of its own."""
    from lockstep.commands.doctor import machine

    wanted, seen = plan.only or PARTS, machine.Machine()
    if {*wanted} - {"storage", "network", "machines"}:
        print_error("looking at torch and the devices")
        for said in follow("devices", plan.timeout, machine.look, plan.device):
            if isinstance(said, Finding):
                yield said
            else:
                seen = said
        yield from machine.agreement(seen, plan.device) if "devices" in wanted and seen.torch else ()
    for part, check in (("launcher", machine.launcher), ("host", machine.capacity), ("storage", machine.storage)):
        if part in wanted:
            yield from follow(part, plan.timeout, check, plan, seen)
    if not {*wanted} & {"network", "collectives", "machines"}:
        return
    from lockstep.commands.doctor import network  # imports torch

    if "network" in wanted:
        yield from follow("network", plan.timeout, network.local, plan)
    if "collectives" in wanted:
        print_error("all-reduces between processes of this machine")
        yield from network.on_host(seen, plan.timeout)
    if plan.nnodes > 1 and "machines" in wanted:
        print_error(f"machine {plan.node_rank} of {plan.nnodes} waits for the others")
        yield from follow("machines", network.MEET_S + 2 * plan.timeout, network.machines, plan)


def follow(part: str, seconds: float, fn: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
    """What a part's generator yields beside texts, and a finding where it fails or does not come to its end."""
    (child,) = run([(fn, *args)], seconds)
    yield from child.values
    if not child.done:
        yield Finding(part, "fail", f"{child.stage}: {child.error or f'no end in {seconds:g} s'}", _HANGS.get(part, ""))
