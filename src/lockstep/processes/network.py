"""This host's network interfaces, and the one on the way to another host."""

import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Interface:
    """A network interface with its addresses."""

    name: str
    up: bool
    addresses: tuple[str, ...]  # IPv4 first

    @property
    def usable(self) -> bool:
        """True where others can be reached through it."""
        return self.up and bool(self.addresses)


def interfaces() -> list[Interface]:
    """The interfaces of this host, in the kernel's order; one that vanishes meanwhile is down and has no address.

    Where the system hides what it knows of their state (/proc or /sys not mounted), those with an address are up.
    """
    addresses, found = psutil.net_if_addrs(), []
    try:
        flags = {name: each.flags.split(",") for name, each in psutil.net_if_stats().items()}
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        flags, names = {name: ["up"] for name in addresses}, list(addresses)
    for name in names:
        up = "up" in flags.get(name, [])  # isup would want a cable as well
        own = [each.address for each in addresses.get(name, []) if each.family in (socket.AF_INET, socket.AF_INET6)]
        found.append(Interface(name, up, tuple(own)))
    return found


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
    """The name of the network interface that has this address; empty where none has it."""
    return next((each.name for each in interfaces() if address in each.addresses), "")
