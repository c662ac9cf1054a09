"""Find the network interface of an address, and the address at which other machines reach this one."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import psutil

from bench.config import ConfigError


def family_of(address: str) -> socket.AddressFamily:
    """Return the address family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this numeric address, such as `eth0`; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def address_of_this_machine(named: str | None = None) -> str:
    """Return the address at which other machines can reach this one.

    Args:
        named: Name or numeric address of this machine; by default its host name.

    Raises:
        ConfigError: The name does not resolve, or resolves to a loopback address.
    """
    name = named or socket.gethostname()
    with suppress(ValueError):
        return str(ipaddress.ip_address(name))
    try:
        results = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        results = []
    addresses = [str(address[0]) for *_, address in results]
    usable = [
        address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]
    if not usable:
        problem = f"resolves to the loopback address {addresses[0]}" if addresses else "does not resolve"
        raise ConfigError(
            f"cluster.address=auto: the name {name} {problem}; set cluster.address to the address at which"
            " the other nodes reach this machine"
        )
    return usable[0]
