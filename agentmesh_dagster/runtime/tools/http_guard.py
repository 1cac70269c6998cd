"""Which network addresses `http` tools may reach, and connections that go to the checked address alone.

A tool's URL may come from a model or from a stranger's input. So a name is resolved once, every address that
it resolves to is checked, and the connection is made to a checked address: what the name resolves to a moment
later does not matter (DNS rebinding). The TLS handshake and the `Host` header keep the name.

Environment proxies are not used: a proxy would resolve names itself, past these checks.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Final, cast

from agentmesh_dagster.constants import ENV_HTTP_ALLOW
from agentmesh_dagster.deadline import DeadlinePassed, within
from agentmesh_dagster.deployment import WHERE, Deployment, HostRule
from agentmesh_dagster.errors import DefinitionError
from agentmesh_dagster.runtime.tools.errors import ToolRefused

if TYPE_CHECKING:
    import httpcore

__all__ = ["AddressPolicy", "Resolver", "checked_addresses", "guarded_backend", "is_public", "resolve_name"]

IPAddress = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Takes a host name and a port, gives IP addresses as text; raises `OSError` where there are none."""

# Beside what Python's `is_global` refuses, which differs a little between Python's versions.
_REFUSED_V4: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_REFUSED_V6: Final = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "3fff::/20"))
_NAT64: Final = IPv6Network("64:ff9b::/96")
_HOST_RULE: Final = re.compile(r"(\*\.)?[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?\Z")


def is_public(address: IPAddress) -> bool:
    """Whether an address belongs to the public internet, the IPv4 address inside an IPv6 one included."""
    address = _unwrapped(address)
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in _REFUSED_V4)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    if address.sixtofour is not None:
        return is_public(address.sixtofour)
    return (
        address in _GLOBAL_V6 and address.is_global and not any(address in network for network in _REFUSED_V6)
    )


def _unwrapped(address: IPAddress) -> IPAddress:
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _literal(host: str) -> IPAddress | None:
    """The address that a host is, in any spelling that the system's resolver would take: `0x7f.1`."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    if not host or not re.fullmatch(r"[0-9A-Fa-fxX.]+", host):
        return None
    try:
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


class AddressPolicy:
    """What the deployment allows besides the public internet.

    Args:
        allow: Rules: a host (`localhost`), a host and port (`localhost:8080`), names below a domain
            (`*.internal.example`), an address (`10.0.0.7`, `[::1]:8080`), or a CIDR (`10.0.0.0/8`). A host
            rule allows every address that the name resolves to.

    Raises:
        DefinitionError: A rule is none of these (code `http-allow`).
    """

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._hosts: list[HostRule] = []
        self._networks: list[tuple[IPv4Network | IPv6Network, int | None]] = []
        for rule in allow:
            if rule.strip():
                self._add(rule.strip().lower())

    @classmethod
    def of_deployment(cls, deployment: Deployment) -> AddressPolicy:
        """The deployment's `private_hosts`, and the rules in `AGENTMESH_HTTP_ALLOW`."""
        return cls([*deployment.private_hosts, *os.environ.get(ENV_HTTP_ALLOW, "").split(",")])

    def _add(self, rule: str) -> None:
        try:
            self._networks.append((ip_network(rule, strict=False), None))
            return
        except ValueError:
            pass
        host, colon, port_text = rule.rpartition(":")
        port: int | None = None
        if not colon:
            host = rule
        elif port_text.isdigit() and int(port_text) < 65536:
            port = int(port_text)
        else:
            host = ""
        address = _literal(host.removeprefix("[").removesuffix("]"))
        if address is not None:
            self._networks.append((ip_network(address), port))
        elif _HOST_RULE.match(host):
            self._hosts.append(HostRule(host, port))
        else:
            raise DefinitionError(
                f"{ENV_HTTP_ALLOW} or private_hosts has the entry {rule!r}: write hosts ('localhost', 'localhost:8080',"
                " '*.internal.example') or CIDRs ('10.0.0.0/8'), separated by commas",
                code="http-allow",
            )

    def allows_host(self, host: str, port: int) -> bool:
        """Whether the name is allowed, whatever it resolves to."""
        host = host.lower().rstrip(".")
        return any(rule.matches(host, port) for rule in self._hosts)

    def allows_address(self, address: IPAddress, port: int) -> bool:
        """Whether the address is public or allowed."""
        address = _unwrapped(address)
        return is_public(address) or any(
            address in network and allowed_port in (None, port) for network, allowed_port in self._networks
        )


async def resolve_name(host: str, port: int) -> Sequence[str]:
    """The addresses of a name, by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def checked_addresses(host: str, port: int, policy: AddressPolicy, resolver: Resolver) -> list[str]:
    """The addresses to connect to for a host, each one allowed.

    Raises:
        ToolRefused: One of the addresses is not allowed (code `http-address`). A name with one private
            address among public ones is refused as a whole: that is how rebinding attacks look.
        OSError: The name does not resolve.
    """
    literal = _literal(host)
    if literal is not None:
        addresses: list[IPAddress] = [literal]
    else:
        addresses = [ip_address(text) for text in await resolver(host, port)]
        if not addresses:
            raise OSError(f"the name {host!r} has no address")
    if literal is not None or not policy.allows_host(host, port):
        for address in addresses:
            if not policy.allows_address(address, port):
                is_same = literal is not None and str(literal) == host
                shown = f"{host!r}" if is_same else f"{host!r} (it is {address})"
                raise ToolRefused(
                    f"the address {shown} is not on the public internet: the deployment has to allow it,"
                    f" by adding the host or a CIDR to {ENV_HTTP_ALLOW}, or to private_hosts of {WHERE}",
                    code="http-address",
                    context={"host": host, "port": port},
                )
    return [str(address) for address in addresses]


def guarded_backend(policy: AddressPolicy, resolver: Resolver = resolve_name) -> httpcore.AsyncNetworkBackend:
    """A network backend for `httpcore` that connects to checked addresses only.

    Its `connect_tcp` raises `ToolRefused` for what the policy refuses, and httpcore's own errors for the
    rest.
    """
    import httpcore

    class GuardedBackend(httpcore.AsyncNetworkBackend):
        def __init__(self) -> None:
            # Typed by its base: httpcore declares it as any object, in case anyio is missing.
            self._plain = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

        async def connect_tcp(
            self,
            host: str,
            port: int,
            timeout: float | None = None,
            local_address: str | None = None,
            socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            try:
                addresses = await within(checked_addresses(host, port, policy, resolver), timeout)
            except DeadlinePassed:
                raise httpcore.ConnectTimeout(f"the name {host!r} was not resolved in time") from None
            except (OSError, UnicodeError) as error:
                raise httpcore.ConnectError(f"the name {host!r} cannot be resolved: {error}") from error
            # An address that does not answer must leave time for the others.
            share = None if timeout is None else timeout / len(addresses)
            for address in addresses[:-1]:
                try:
                    return await self._plain.connect_tcp(address, port, share, local_address, socket_options)
                except (httpcore.ConnectError, httpcore.ConnectTimeout):
                    continue
            return await self._plain.connect_tcp(addresses[-1], port, share, local_address, socket_options)

        async def connect_unix_socket(
            self,
            path: str,
            timeout: float | None = None,
            socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
        ) -> httpcore.AsyncNetworkStream:
            raise ToolRefused(f"unix sockets are not reached by tools ({path!r})", code="http-address")

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(seconds)

    return GuardedBackend()
