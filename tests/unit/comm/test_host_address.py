"""The addresses of this host, against what the kernel lists."""

from __future__ import annotations

import socket
import sys
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
    found = host_address.interfaces()
    assert set(found) <= {name for _, name in socket.if_nameindex()}
    for address in found.values():
        assert f"|-- {address}\n" in listed


@pytest.mark.parametrize(
    ("addresses", "named"), [(["127.0.1.1"], False), ([], False), (["127.0.0.1", "10.0.0.2"], True)]
)
def test_a_name_that_leads_to_the_loopback_is_none(
    addresses: list[str], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname_ex", lambda name: (name, [], addresses))
    assert host_address.is_named() is named


def test_a_host_without_a_name_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> None:
        raise socket.gaierror(name)

    monkeypatch.setattr(socket, "gethostbyname_ex", unknown)
    assert not host_address.is_named()
