"""This host's network interfaces, and the one on the way to another host."""

import errno
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

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
    import fcntl

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


def address_towards(host: str) -> str:
    """This host's address on the way to another one; empty where its name is unknown or there is no way."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The name of the network interface that has this address; empty where none has it, or not on Linux."""
    return next((each.name for each in interfaces() if address in each.addresses), "")
