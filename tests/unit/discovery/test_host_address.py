"""The addresses of this host, against what the kernel lists."""

from __future__ import annotations

import socket
import sys
from ipaddress import IPv6Address
from pathlib import Path

import pytest

from polyaccel.comm import host_address


def test_the_way_to_oneself_is_oneself() -> None:
    assert host_address.address_facing("127.0.0.1") == "127.0.0.1"
    for name, address in host_address.interfaces().items():
        assert host_address.address_facing(address) == address
        assert host_address.interface_facing(address) == name


def test_the_loopback_leads_to_no_other_host() -> None:
    assert host_address.interface_facing("127.0.0.1") is None
    assert not any(address.startswith("127.") for address in host_address.own_addresses())


def test_no_way_is_none() -> None:
    assert host_address.address_facing("no such host") is None
    assert host_address.interface_facing("no such host") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own list is Linux's")
def test_interfaces_are_those_that_the_kernel_lists() -> None:
    listed = Path("/proc/net/fib_trie").read_text()
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    of_ipv6 = {(words[-1], str(IPv6Address(bytes.fromhex(words[0])))) for words in lines}
    found = host_address.interfaces()
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    for name, address in found.items():
        assert f"|-- {address}\n" in listed or (name, address) in of_ipv6


@pytest.mark.parametrize(
    ("present", "routes", "found"),
    [
        ({"eth0": "10.0.0.2", "docker0": "172.17.0.1"}, {"10.0.0.1": "10.0.0.2"}, "eth0"),
        ({"eth0": "10.0.0.1", "ib0": "10.1.0.1"}, {"10.0.0.1": "10.0.0.1"}, "eth0"),  # rank 0's host itself
        ({"eth0": "10.0.0.1"}, {"10.0.0.1": "127.0.0.1"}, "eth0"),  # it calls itself by the loopback
        ({"eth0": "10.0.0.1", "docker0": "172.17.0.1"}, {"192.0.2.1": "10.0.0.1"}, "eth0"),
        ({"eth0": "10.0.0.1", "docker0": "172.17.0.1"}, {}, None),
        ({}, {}, None),
    ],
)
def test_between_hosts_it_is_the_interface_on_the_way(
    present: dict[str, str], routes: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_address, "interfaces", lambda: present)
    monkeypatch.setattr(host_address, "address_facing", routes.get)
    assert host_address.interface_between_hosts("10.0.0.1") == found


def test_hosts_that_meet_at_the_loopback_talk_by_it() -> None:
    assert host_address.interface_between_hosts("127.0.0.1") == host_address.loopback_interface()


def test_a_host_without_a_name_has_no_address_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise socket.gaierror(name)

    monkeypatch.setattr(socket, "gethostbyname_ex", unknown)
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_: unknown(name))
    assert host_address.named_addresses() == []


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_addresses_of_ipv6_are_found_as_those_of_ipv4() -> None:
    assert host_address.address_facing("::1") == "::1"
    assert host_address.means_this_host("::1")
    assert host_address.interface_between_hosts("::1") == host_address.loopback_interface()
    assert host_address.interface_facing("::1") is None


def test_an_interface_without_ipv4_has_its_address_of_ipv6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "if_inet6").write_text(
        "fd770001000000000000000000000002 02 40 00 80     ib9\n"
        "fe800000000000000000000000000002 02 40 20 80     ib9\n"
        "fe800000000000000000000000000003 03 40 20 80     ib8\n"
        "00000000000000000000000000000001 01 80 10 80     lo9\n"
    )
    monkeypatch.setattr(host_address, "_IPV6_FILE", tmp_path / "if_inet6")
    found = host_address.interfaces()
    assert found["ib9"] == "fd77:1::2"
    assert not {"ib8", "lo9"} & set(found)
    monkeypatch.setattr(host_address, "address_facing", lambda peer: "fd77:1::2")
    assert host_address.interface_facing("fd77:1::1") == "ib9"
