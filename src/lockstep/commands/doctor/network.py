"""This host's name, network interfaces and ports: where the other ranks would be told to look for it."""

import ipaddress
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.commands.doctor.finding import Finding, fail, ok, warn, within
from lockstep.processes.network import Interface, interfaces
from lockstep.processes.proc import listener_at

Resolver = Callable[[str], list[str]]


def resolve(name: str) -> list[str]:
    """A name's addresses, in the resolver's order.

    Raises:
        OSError: where it has none.
    """
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))


def is_loopback(address: str) -> bool:
    """True for an address that each host has for itself."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def outward(found: Iterable[Interface]) -> list[str]:
    """The interfaces that lead to other hosts, in the order in which NCCL prefers them.

    InfiniBand comes first, Docker's bridges last (docs.nvidia.com/deeplearning/nccl, "NCCL_SOCKET_IFNAME").
    """
    names = [each.name for each in found if each.usable and not is_loopback(each.addresses[0])]
    return sorted(names, key=lambda name: (not name.startswith("ib"), name.startswith("docker")))


def own_address() -> str:
    """An address of this host for others, or its name where none but the loopback is up."""
    found = interfaces()
    names = outward(found)
    return next((each.addresses[0] for each in found if names and each.name == names[0]), socket.gethostname())


def host_name(nnodes: int, seconds: float, name: str, resolver: Resolver = resolve) -> Finding:
    """Does this host's own name have an address, and one for the others to use?

    A run needs none: it names gloo the interface on the way to machine 0. torchrun's elastic rendezvous tells the name.
    """
    check = "host name"
    judged = fail if nnodes > 1 else warn
    remedy = f"a line `ADDRESS {name}` in /etc/hosts or in the name server."
    try:
        addresses = within(seconds, resolver, name)
    except TimeoutError:
        message = f"{name}: the name server did not answer in {seconds:g} s, as at every connection by name"
        return judged(check, message, f"Check /etc/resolv.conf, or: {remedy}")
    except OSError as error:
        if nnodes == 1:
            message = f"{name} has no address ({error.strerror}); the ranks of this host meet on the loopback"
            return warn(check, message, f"A line `127.0.1.1 {name}` in /etc/hosts.")
        return judged(check, f"{name} has no address ({error.strerror})", remedy)
    shown = f"{name} is {', '.join(addresses)}"
    if nnodes > 1 and all(map(is_loopback, addresses)):
        message = f"{shown}: whom torchrun's elastic rendezvous tells the name would look for this machine at itself"
        return warn(check, message, f"torchrun --local-addr ADDRESS, or {remedy}", addresses=addresses)
    return ok(check, shown, addresses=addresses)


def nccl_matches(spec: str, names: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME leaves.

    Prefixes with commas between them; ^ in front excludes them, = takes them as whole names
    (docs.nvidia.com/deeplearning/nccl, "Environment Variables").
    """
    exclude, rest = spec.startswith("^"), spec.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    words = [word for word in rest.split(",") if word]
    return [n for n in names if any(n == w if exact else n.startswith(w) for w in words) != exclude]


def interface(found: list[Interface], environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Which interfaces are up, and whether those that the environment names are among them."""
    usable = [each for each in found if each.usable]
    shown = "; ".join(f"{each.name} {each.addresses[0]}" for each in usable)
    there = f"Of those there are: {shown or 'none'}."
    findings = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        spec = environ.get(variable, "")
        if not spec:
            continue
        names = [each.name for each in found]
        named = spec.split(",") if variable.startswith("GLOO") else []
        missing = [name for name in named if name not in names]
        chosen = [name for name in named if name in names] if named else nccl_matches(spec, names)
        silent = [each.name for each in found if each.name in chosen and not each.usable]
        if missing or not chosen:
            message = f"{variable}={spec} names no interface of this host"
            findings.append(fail(variable, message, f"Unset it, or name one that others reach. {there}"))
        elif len(silent) == len(chosen):
            message = f"{variable}={spec}: {', '.join(silent)} is down or has no address"
            findings.append(fail(variable, message, f"`ip link set {silent[0]} up`, or name another. {there}"))
        else:
            findings.append(ok(variable, f"{variable}={spec}: {', '.join(n for n in chosen if n not in silent)}"))
    numbers: dict[str, Any] = {each.name: list(each.addresses) for each in usable}
    if not any(is_loopback(address) for each in usable for address in each.addresses):
        message = f"no loopback interface is up ({shown or 'no interface has an address'})"
        return [*findings, fail("interfaces", message, "`ip link set lo up`.", **numbers)]
    if not outward(found):
        message = f"{shown}: none but the loopback is up"
        return [*findings, warn("interfaces", message, "Fine for one machine; else bring one up.", **numbers)]
    message = f"{shown}; NCCL would take {outward(found)[0]} by itself"
    return [*findings, ok("interfaces", message, **numbers)]


def port(number: int, seconds: float) -> Finding:
    """A rendezvous on this host itself: bind the port (0: any), connect by loopback, and hear each other."""
    check = "port"
    shown = f"port {number}" if number else "a free port"
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(seconds)
        try:
            listener.bind(("", number))
            listener.listen(1)
        except PermissionError as error:
            return fail(check, f"{shown}: {error.strerror}", "Use --master-port 1024 or above, as 29500.")
        except OSError as error:
            holder = listener_at(number)
            remedy = f"End {holder or 'what listens there'}, or name another port by --master-port on every machine."
            return fail(check, f"{shown}: {error.strerror}{f', by {holder}' if holder else ''}", remedy)
        own = listener.getsockname()[1]
        try:
            with socket.create_connection(("127.0.0.1", own), seconds) as there:
                here, _ = listener.accept()
                with here:
                    here.settimeout(seconds)
                    there.sendall(b"lockstep")
                    heard = here.recv(8)
        except OSError as error:
            remedy = "Let the loopback through the firewall, and have it up: `ip link set lo up`."
            return fail(check, f"port {own} could be opened, not reached by 127.0.0.1: {error}", remedy)
    if heard != b"lockstep":
        return fail(check, f"port {own}: what was sent over 127.0.0.1 did not arrive", "Check proxies on the loopback.")
    return ok(check, f"{shown}: opened, and reached by 127.0.0.1", port=own)
