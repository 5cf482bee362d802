"""This host's name, network interfaces and ports: where the other ranks would be told to look for it."""

import errno
import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.tools.doctor.finding import Finding, fail, ok, skipped, warn, within

Resolver = Callable[[str], list[str]]
_SIOCGIFADDR, _IFF_UP = 0x8915, 1  # linux/sockios.h, linux/if.h
_INET6 = Path("/proc/net/if_inet6")


@dataclass(frozen=True)
class Interface:
    """A network interface with its addresses."""

    name: str
    up: bool
    addresses: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """True where others can be reached through it."""
        return self.up and bool(self.addresses)


def interfaces() -> list[Interface]:
    """The interfaces of this host, in the kernel's order; addresses on Linux only."""
    return [_interface(name) for _, name in socket.if_nameindex()]


def _interface(name: str) -> Interface:
    if sys.platform != "linux":
        return Interface(name, True, ())
    flags = int(Path("/sys/class/net", name, "flags").read_text(), 16)
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            addresses.append(socket.inet_ntoa(answer[20:24]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # it has none
                raise
    lines = _INET6.read_text().splitlines() if _INET6.exists() else []
    raw = [line.split()[0] for line in lines if line.split()[5] == name]
    addresses += [str(ipaddress.IPv6Address(bytes.fromhex(digits))) for digits in raw]
    return Interface(name, bool(flags & _IFF_UP), tuple(addresses))


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


def host_name(
    nnodes: int,
    seconds: float,
    name: str,
    found: Iterable[Interface],
    resolver: Resolver = resolve,
    environ: Mapping[str, str] = os.environ,
) -> Finding:
    """Does this host's own name have an address, and one for the others to use?

    gloo tells the other ranks the address of this host's name, unless GLOO_SOCKET_IFNAME names an interface.
    """
    check = "host name"
    judged = fail if nnodes > 1 and not environ.get("GLOO_SOCKET_IFNAME") else warn
    out = (outward(found) or ["INTERFACE"])[0]
    remedy = f"GLOO_SOCKET_IFNAME={out}, or a line `ADDRESS {name}` in /etc/hosts or in the name server."
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
        message = f"{shown}: other machines would be told to look for this one at themselves"
        return judged(check, message, remedy, addresses=addresses)
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
    if sys.platform != "linux":
        return [*findings, skipped("interfaces", f"addresses are not read on {sys.platform}")]
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
            holder = _holder(number)
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


def _holder(number: int) -> str:
    """The process that listens at a port, where /proc tells."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path("/proc/net", name))]
    listening = f":{number:04X}", "0A"
    inodes = {words[9] for words in lines if (words[1][-5:], words[3]) == listening}
    for handle in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            target = str(handle.readlink())
            if target.startswith("socket:[") and target[8:-1] in inodes:
                process = handle.parts[2]
                return f"{Path('/proc', process, 'comm').read_text().strip()} (pid {process})"
        except OSError:  # gone, or somebody else's
            continue
    return ""


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []
