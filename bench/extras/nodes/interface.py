"""Which network interface an address is of, and which address other machines reach this one by."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import psutil

from bench.config import ConfigError


def family_of(address: str) -> socket.AddressFamily:
    """Of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str | None:
    """The name of the interface with this numeric address, such as `eth0`; None where there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def address_of_this_machine(named: str | None = None) -> str:
    """What this machine's name resolves to; raises ConfigError where other machines cannot use that.

    `named` is the name or numeric address that others are known to reach it by, where one is.
    """
    name = named or socket.gethostname()
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    addresses = [str(address[0]) for *_, address in found]
    usable = [each for each in addresses if not ipaddress.ip_address(each.partition("%")[0]).is_loopback]
    if not usable:
        said = f"resolves to {addresses[0]}, which is this machine's own" if addresses else "does not resolve"
        raise ConfigError(
            f"cluster.address=auto: the name {name} {said}; write cluster.address= and the address by which"
            " the other nodes reach this machine"
        )
    return usable[0]
