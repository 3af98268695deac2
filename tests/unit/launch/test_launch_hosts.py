"""Hostfiles, filters and counts: what is written is what is used, and what cannot be is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyaccel.errors import LaunchError
from polyaccel.launch.hosts import (
    Hosts,
    address_of,
    excluded,
    first_hosts,
    first_slots,
    included,
    is_here,
    listed_hosts,
    read_hostfile,
    without_user,
)

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True) | st.sampled_from(["::1", "fe80::2:1", "10.0.0.1"])
HOSTS = st.dictionaries(NAMES, st.integers(1, 9).map(lambda count: tuple(range(count))), min_size=1, max_size=6)


def _written(slots: set[int], data: st.DataObject) -> str:
    """These slots as a filter has them: in any order, with ranges or without."""
    parts, rest = [], sorted(slots)
    while rest:
        run = 1
        while run < len(rest) and rest[run] == rest[0] + run:
            run += 1
        length = data.draw(st.integers(1, run))
        parts.append(f"{rest[0]}-{rest[length - 1]}" if length > 1 else f"{rest[0]}")
        rest = rest[length:]
    return ",".join(data.draw(st.permutations(parts)))


@given(HOSTS, st.data())
def test_a_filter_takes_or_leaves_what_it_names(hosts: Hosts, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(sorted(hosts)), min_size=1, unique=True))
    slots, parts = Hosts(), []
    for host in chosen:
        named = f"[{host}]" if ":" in host else host
        if data.draw(st.booleans()):
            slots[host] = hosts[host]
            parts.append(named)
        else:
            some = data.draw(st.sets(st.sampled_from(hosts[host]), min_size=1))
            slots[host] = tuple(sorted(some))
            parts.append(f"{named}:{_written(some, data)}")
    text = "@".join(parts)
    taken = included(hosts, text)
    assert taken == slots
    assert list(taken) == [host for host in hosts if host in slots]
    left = {host: tuple(set(hosts[host]) - set(slots.get(host, ()))) for host in hosts}
    left = {host: tuple(sorted(rest)) for host, rest in left.items() if rest}
    if left:
        assert excluded(hosts, text) == left
    else:
        with pytest.raises(LaunchError) as caught:
            excluded(hosts, text)
        assert caught.value.value == "--exclude"


@given(HOSTS, st.data())
def test_a_list_of_hosts_says_what_was_written(hosts: Hosts, data: st.DataObject) -> None:
    parts = []
    for host, slots in hosts.items():
        named = f"[{host}]" if ":" in host else host
        is_said = len(slots) > 1 or data.draw(st.booleans())
        parts.append(f"{named}:{len(slots)}" if is_said else named)
    assert listed_hosts(data.draw(st.sampled_from([",", ", "])).join(parts)) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", "a:0", "a:x", "a:2,a", "a:4097", "a b", "::1", "[]:2", "a:1:2", "a:9999999999"]
)
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        listed_hosts(text)
    assert caught.value.value == text
    assert "--hosts" in str(caught.value)


@given(HOSTS, st.lists(st.sampled_from(["", "# a comment", "   "]), max_size=4), st.integers(0, 3))
def test_a_hostfile_says_what_was_written(hosts: Hosts, between: list[str], spaces: int) -> None:
    lines = [f"{host} {' ' * spaces}slots={len(slots)}  # of {host}" for host, slots in hosts.items()]
    text = "\n".join(line for pair in zip(lines, [*between, *[""] * len(lines)], strict=False) for line in pair)
    file = _File(text)
    assert list(read_hostfile(file).items()) == list(hosts.items())


@given(st.text(alphabet="ab :@[],-0129\n=slots#", max_size=30))
def test_whatever_is_written_is_hosts_or_one_error(text: str) -> None:
    for read in (lambda: read_hostfile(_File(text)), lambda: included({"a": (0, 1), "b": (0,)}, text)):
        try:
            hosts = read()
        except LaunchError:
            continue
        assert hosts
        assert all(slots == tuple(sorted(set(slots))) for slots in hosts.values())


class _File(type(Path())):  # type: ignore[misc]
    """A file of this text."""

    def __new__(cls, text: str) -> _File:
        file = super().__new__(cls, "hosts")
        file.text = text
        return file

    def __init__(self, text: str) -> None:
        if sys.version_info >= (3, 12):  # before, a path is made by __new__ alone
            super().__init__("hosts")

    def read_bytes(self) -> bytes:
        return str(self.text).encode()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a", ("line 1", "'a'", "`host slots=N`")),
        ("\na slots=x", ("line 2", "'a slots=x'")),
        ("a slots=1\n\na slots=2", ("line 3", "'a slots=2'")),
        ("a slots=0", ("line 1", "'a slots=0'")),
        ("a slots=99999", ("line 1", "99999", "4096")),
        ("a slots=0\nb\n", ("line 1", "line 2", "'b'")),
        ("# nobody\n", ()),
    ],
)
def test_a_hostfile_that_is_wrong_is_named_with_its_lines(text: str, named: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(tmp_path / "hosts")
    assert caught.value.value == str(tmp_path / "hosts")
    assert all(part in str(caught.value) for part in named)
    with pytest.raises(LaunchError) as caught:
        read_hostfile(tmp_path / "none" / "hosts")
    assert caught.value.value == str(tmp_path / "none/hosts")
    assert "--hostfile" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("z", "a, b"),
        ("a:2", "0, 1"),
        ("a:0-99999999999", "0, 1"),
        ("a:1-0", "'1-0'"),
        ("a:", "a:0,2-4"),
        ("a:x", "'x'"),
        ("a@a:1", "'a'"),
        ("@a", "[::1]:0"),
        (":1", "':1'"),
    ],
)
def test_a_filter_that_is_wrong_is_one_sentence(text: str, named: str) -> None:
    for choose, option in ((included, "--include"), (excluded, "--exclude")):
        with pytest.raises(LaunchError) as caught:
            choose({"a": (0, 1), "b": (0,)}, text)
        assert caught.value.value == text
        assert named in str(caught.value)
        assert f"{option} {text}" in str(caught.value)
        assert caught.value.hint


def test_counts_take_the_first() -> None:
    hosts = {"a": (0, 1), "b": (0, 1, 2, 3)}
    assert first_hosts(hosts, 1) == {"a": (0, 1)}
    assert first_slots(hosts, 3) == {"a": (0, 1, 2), "b": (0, 1, 2)}
    for count in (0, 3):
        with pytest.raises(LaunchError) as caught:
            first_hosts(hosts, count)
        assert caught.value.value == count
        assert "--num-nodes" in str(caught.value)
    with pytest.raises(LaunchError) as caught:
        first_slots(hosts, 0)
    assert caught.value.value == 0
    assert "--ranks" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "hosts"),
    [
        (b"\xef\xbb\xbfa slots=2\r\nb slots=1\r\n", {"a": (0, 1), "b": (0,)}),
        ("\ufeffa slots=2\n".encode("utf-16-le"), {"a": (0, 1)}),
        (b"# M\xfcller's\na slots=1\n", {"a": (0,)}),
        (b"a slots=2 max_slots=8\n", {"a": (0, 1)}),
        (b"a slots=8 max-slots=8  # full\nb\tslots=1\tmax_slots=2 cpu=intel", {"a": tuple(range(8)), "b": (0,)}),
        (b"me@a slots=1\nme@b slots=2\n", {"me@a": (0,), "me@b": (0, 1)}),
    ],
)
def test_hostfiles_of_other_programs_are_read(data: bytes, hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(data)
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize("data", [b"a slots=8 max_slots=4", b"a slots=8 8", b"a max_slots=4", b"a slots=2slots=3"])
def test_a_line_that_contradicts_itself_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(data)
    with pytest.raises(LaunchError) as raised:
        read_hostfile(tmp_path / "hosts")
    assert raised.value.value == str(tmp_path / "hosts")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:0@a:1", {"a": (0, 1)}),
        ("a:1@b@a:0,1", {"a": (0, 1), "b": (0,)}),
        ("a@a", {"a": (0, 1)}),
        ("me@c", {"me@c": (0, 1, 2)}),
        ("me@c:1@a:0", {"a": (0,), "me@c": (1,)}),
        ("a@me@c:0-1", {"a": (0, 1), "me@c": (0, 1)}),
        ("c:2", {"me@c": (2,)}),
        ("me@c:0@me@c:2", {"me@c": (0, 2)}),
    ],
)
def test_a_filter_may_name_users_and_hosts_more_than_once(text: str, hosts: Hosts) -> None:
    assert included({"a": (0, 1), "b": (0,), "me@c": (0, 1, 2)}, text) == hosts


def test_the_address_of_a_host_has_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "me")
    assert [address_of(host) for host in ("a", "me@a", "me@fe80::1")] == ["a", "a", "fe80::1"]
    assert is_here("localhost")
    assert is_here("me@localhost")
    assert not is_here("you@localhost")
    assert without_user({"me@a": (0,), "b": (0,)}, "slurm") == {"a": (0,), "b": (0,)}
    with pytest.raises(LaunchError) as raised:
        without_user({"you@a": (0,)}, "slurm")
    assert raised.value.value == "you@a"
