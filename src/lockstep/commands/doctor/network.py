"""This host's name, network interfaces and ports: where the other ranks look for it."""

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Mapping

from lockstep.commands.doctor.finding import Finding, graded, within
from lockstep.processes.network import Interface, address_towards, interface_of, interfaces
from lockstep.processes.proc import listener_at


def resolve(name: str) -> list[str]:
    """A name's addresses, in the resolver's order; OSError where it has none."""
    return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(name, None)))


def lookup(name: str, seconds: float) -> tuple[list[str], str]:
    """A name's addresses, and where there are none the reason."""
    try:
        return within(seconds, resolve, name), ""
    except TimeoutError:
        return [], f"{name}: the name server did not answer in {seconds:g} s, as at every connection by name"
    except OSError as error:
        return [], f"{name} has no address ({error.strerror})"


def is_loopback(address: str) -> bool:
    """True for an address that each host has for itself."""
    return ipaddress.ip_address(address).is_loopback


def outward(found: Iterable[Interface]) -> list[Interface]:
    """The interfaces that lead to other hosts, in the order in which NCCL prefers them.

    InfiniBand comes first, Docker's bridges last (docs.nvidia.com/deeplearning/nccl, "NCCL_SOCKET_IFNAME").
    """
    leading = [each for each in found if each.usable and not is_loopback(each.addresses[0])]
    return sorted(leading, key=lambda each: (not each.name.startswith("ib"), each.name.startswith("docker")))


def own_address() -> str:
    """An address of this host for others, or its name where none but the loopback is up."""
    return next((each.addresses[0] for each in outward(interfaces())), socket.gethostname())


def host_name(nnodes: int, seconds: float, name: str) -> Finding:
    """Does this host's own name have an address, and one for the others to use?

    A run needs none: it names gloo the interface on the way to machine 0. torchrun's elastic rendezvous gives the
    name to the others.
    """
    check, several = "host name", nnodes > 1
    addresses, why = lookup(name, seconds)
    remedy = f"a line `ADDRESS {name}` in /etc/hosts or in the name server"
    if why and several:
        return Finding(check, "fail", why, f"Check /etc/resolv.conf, or {remedy}.")
    if why:
        message = f"{why}; the ranks of this host meet on the loopback"
        return Finding(check, "warn", message, f"A line `127.0.1.1 {name}` in /etc/hosts.")
    message, lost = f"{name} is {', '.join(addresses)}", several and all(map(is_loopback, addresses))
    if lost:
        message += ": whom torchrun's elastic rendezvous tells the name would look for this machine at itself"
    remedy = f"torchrun --local-addr ADDRESS, or {remedy}."
    return graded(check, message, {"addresses": addresses}, (lost, "warn", remedy))


def nccl_matches(spec: str, names: Iterable[str]) -> list[str]:
    """The interfaces that NCCL_SOCKET_IFNAME leaves.

    Prefixes with commas between them; ^ in front excludes them, = takes them as whole names
    (docs.nvidia.com/deeplearning/nccl, "Environment Variables").
    """
    exclude, rest = spec.startswith("^"), spec.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    given = [each for each in rest.split(",") if each]
    return [name for name in names if any(name == g if exact else name.startswith(g) for g in given) != exclude]


def interface(found: list[Interface], environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Which interfaces are up, and whether those that the environment names are among them."""
    usable = {each.name: each.addresses for each in found if each.usable}
    shown = "; ".join(f"{name} {addresses[0]}" for name, addresses in usable.items())
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if spec := environ.get(variable, ""):
            names = [each.name for each in found]
            chosen = spec.split(",") if variable.startswith("GLOO") else nccl_matches(spec, names)
            there = f"Of those there are: {shown or 'none'}."
            if not chosen or not set(chosen) <= set(names):
                message = f"{variable}={spec} names no interface of this host"
                yield Finding(variable, "fail", message, f"Unset it, or name one that others reach. {there}")
            elif up := [name for name in chosen if name in usable]:
                yield Finding(variable, "ok", f"{variable}={spec}: {', '.join(up)}")
            else:
                message = f"{variable}={spec}: {', '.join(chosen)} is down or has no address"
                yield Finding(variable, "fail", message, f"`ip link set {chosen[0]} up`, or name another. {there}")
    check, numbers = "interfaces", {name: list(addresses) for name, addresses in usable.items()}
    if not any(is_loopback(address) for addresses in usable.values() for address in addresses):
        message = f"no loopback interface is up ({shown or 'no interface has an address'})"
        yield Finding(check, "fail", message, "`ip link set lo up`.", numbers)
    elif leading := outward(found):
        yield Finding(check, "ok", f"{shown}; NCCL would take {leading[0].name} by itself", "", numbers)
    else:
        remedy = "Fine for one machine; else bring one up."
        yield Finding(check, "warn", f"{shown}: none but the loopback is up", remedy, numbers)


def port(number: int, seconds: float) -> Finding:
    """A rendezvous on this host itself: bind the port (0: any), and connect by loopback."""
    check, shown = "port", f"port {number}" if number else "a free port"
    try:
        listener = socket.create_server(("", number))
    except OSError as error:
        message = f"{shown}: {os.strerror(error.errno or 0)}"
        if isinstance(error, PermissionError):
            return Finding(check, "fail", message, "Use --master-port 1024 or above, as 29500.")
        holder = listener_at(number)
        remedy = f"End {holder or 'what listens there'}, or name another port by --master-port on every machine."
        return Finding(check, "fail", f"{message}{f', by {holder}' if holder else ''}", remedy)
    with listener:
        listener.settimeout(seconds)
        own = listener.getsockname()[1]
        try:
            with socket.create_connection(("127.0.0.1", own), seconds) as there, listener.accept()[0] as here:
                here.sendall(b"lockstep")
                arrived = there.recv(8)
        except OSError as error:
            remedy = "Let the loopback through the firewall, and have it up: `ip link set lo up`."
            return Finding(check, "fail", f"port {own} could be opened, not reached by 127.0.0.1: {error}", remedy)
    if arrived != b"lockstep":
        message = f"port {own}: what was sent over 127.0.0.1 did not arrive"
        return Finding(check, "fail", message, "Check proxies on the loopback.")
    return Finding(check, "ok", f"{shown}: opened, and reached by 127.0.0.1", numbers={"port": own})


def listening(nnodes: int, master_addr: str, environ: Mapping[str, str] = os.environ) -> Finding:
    """What a run would open to whom, as `processes/listening.py` has it."""
    check, loopback = "listening", next((i.name for i in interfaces() if "127.0.0.1" in i.addresses), "")
    named = {name: environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if environ.get(name)}
    beyond = " ".join(f"{name}={value}" for name, value in named.items() if value != loopback)
    if nnodes == 1:
        message = f"a run on this machine listens at 127.0.0.1 ({loopback}) alone"
        remedy = "Unset them for runs on one machine: whoever reaches that interface can disturb the run."
        message += f", but {beyond}" if beyond else ""
        return graded(check, message, {"interface": loopback}, (bool(beyond), "warn", remedy))
    own = environ.get("GLOO_SOCKET_IFNAME") or interface_of(address_towards(master_addr)) or "the way to machine 0"
    store = f"machine 0's store at {master_addr or '--master-addr'}"
    message = f"{store}, and gloo's and NCCL's ports on {own}, without a password: keep strangers out (SECURITY.md)"
    return Finding(check, "ok", message, "", {"interface": own})
