"""The hosts of a job and the slots that it uses on each: hostfiles, filters and counts, in DeepSpeed's spelling.

A slot is a device by number; on a machine without devices it is a rank. A host may be `user@host`: ssh logs in as that
user, and its address is `host`.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from polyaccel.errors import LaunchError
from polyaccel.launch.environment_file import read_text

Hosts = dict[str, tuple[int, ...]]
"""The slots to use on each host, ascending; hosts in the order of their ranks."""
MOST_SLOTS = 4096
"""More ranks than this on one machine are a slip of the pen."""
_LINE = re.compile(r"(\S+)\s+slots=(\d+)((?:\s+[\w-]+=\S+)*)")
_MOST = re.compile(r"max[-_]slots=(\d+)")
_LISTED = re.compile(r"(\[[^\]\s]+\]|[^:\[\]\s]+)(?::(\d+))?")
_PART = re.compile(r"\s*(\[[^\]]+\]|[^:\[\]]+)(?::(.*))?\s*", re.DOTALL)
_SLOTS = re.compile(r"(\d+)(?:-(\d+))?")


def read_hostfile(file: Path) -> Hosts:
    """Read `host slots=N` lines, with comments and MPIs' additions. Raises LaunchError for all bad lines."""
    try:
        lines = read_text(file).splitlines()
    except OSError as error:
        raise LaunchError(
            f"the hostfile {file} cannot be read: {error}", hint="give a text file: --hostfile FILE", value=str(file)
        ) from error
    hosts, wrong = Hosts(), list[str]()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if found is None:
            wrong.append(f"line {number}: {text!r} is not a line `host slots=N`")
        elif not 1 <= int(found[2]) <= MOST_SLOTS:
            wrong.append(f"line {number}: {text!r} has {found[2]} slots, and 1 to {MOST_SLOTS} can be used")
        elif (most := _MOST.search(found[3])) and int(most[1]) < int(found[2]):
            wrong.append(f"line {number}: {text!r} has more slots than it may have")
        elif found[1] in hosts:
            wrong.append(f"line {number}: {text!r} names its host a second time")
        else:
            hosts[found[1]] = tuple(range(int(found[2])))
    if wrong:
        hint = "write each host once, as `host slots=2`"
        raise LaunchError(f"{file}, {'; '.join(wrong)}", hint=hint, value=str(file))
    if not hosts:
        hint = "write lines `host slots=2`, or leave --hostfile out"
        raise LaunchError(f"{file} names no host", hint=hint, value=str(file))
    return hosts


def listed_hosts(text: str) -> Hosts:
    """The hosts of `a:8,b`: eight slots of `a`, one of `b`. Raises LaunchError, naming the part that is none."""
    hosts = Hosts()
    for part in text.split(","):
        found = _LISTED.fullmatch(part.strip())
        count = 0 if found is None or len(found[2] or "") > 9 else int(found[2] or 1)
        host = "" if found is None else found[1].removeprefix("[").removesuffix("]")
        if not host or not 1 <= count <= MOST_SLOTS or host in hosts:
            hint = f"write each host once, as HOST or HOST:N with 1 to {MOST_SLOTS} slots: a:8,b:8"
            raise LaunchError(f"--hosts {text!r}: {part!r} is not a host", hint=hint, value=text)
        hosts[host] = tuple(range(count))
    return hosts


def included(hosts: Mapping[str, tuple[int, ...]], text: str) -> Hosts:
    """Return `hosts` that `text` names, in order: `a@b:0,2-4` is all of `a` and four slots of `b`."""
    wanted = _parsed(text, hosts, "--include")
    return _not_empty({host: wanted.get(host, ()) for host in hosts}, "--include")


def excluded(hosts: Mapping[str, tuple[int, ...]], text: str) -> Hosts:
    """Return `hosts` without what `text` names, as for `included`. Raises LaunchError if none is left."""
    out = _parsed(text, hosts, "--exclude")
    left = {host: tuple(slot for slot in slots if slot not in out.get(host, ())) for host, slots in hosts.items()}
    return _not_empty(left, "--exclude")


def first_hosts(hosts: Mapping[str, tuple[int, ...]], count: int) -> Hosts:
    """The first `count` of `hosts`. Raises LaunchError where there are fewer."""
    if not 1 <= count <= len(hosts):
        hint = f"give a number from 1 to {len(hosts)}, or name more hosts in a hostfile, with lines `host slots=N`"
        raise LaunchError(f"--num-nodes {count}, and {_count(len(hosts), 'host')} given", hint=hint, value=count)
    return dict(list(hosts.items())[:count])


def first_slots(hosts: Mapping[str, tuple[int, ...]], count: int) -> Hosts:
    """Return slots 0 to `count` - 1 of every host."""
    if not 1 <= count <= MOST_SLOTS:
        hint = f"give a number from 1 to {MOST_SLOTS}, or leave it out"
        raise LaunchError(f"--ranks {count}: ranks on each host cannot be so many", hint=hint, value=count)
    return {host: tuple(range(count)) for host in hosts}


def is_here(host: str) -> bool:
    """Whether a name is this machine's, and the user that it names, if any, this process's."""
    own = socket.gethostname()
    user, _, address = host.rpartition("@")
    return address in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0]) and user in ("", _this_user())


def address_of(host: str) -> str:
    """The name or address of a host, without the user."""
    return host.rpartition("@")[2]


def without_user(hosts: Mapping[str, tuple[int, ...]], launcher: str) -> Hosts:
    """`hosts` for a command that starts ranks as this process's user. Raises LaunchError for another one."""
    for host in hosts:
        user = host.rpartition("@")[0]
        if user not in ("", _this_user()):
            raise LaunchError(
                f"--launcher {launcher} starts ranks as {_this_user()}, and the job has {host}",
                hint="leave the user out, or use --launcher ssh",
                value=host,
            )
    return {address_of(host): slots for host, slots in hosts.items()}


def _this_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def _parsed(text: str, hosts: Mapping[str, tuple[int, ...]], option: str) -> Hosts:
    found, whole = Hosts(), dict[str, bool]()
    parts = text.split("@")
    while parts:
        taken, part = 1, parts[0]
        joined = "@".join(parts[:2])
        if "@" in _host_in(joined) and _host_in(joined) in hosts:  # user@host
            taken, part = 2, joined
        del parts[:taken]
        host = _host_in(part)
        if not host:
            hint = "write host:0,2-4@host2, and an IPv6 address as [::1]:0"
            raise LaunchError(f"{option} {text}: {part!r} names no host", hint=hint, value=text)
        host = _known_as(host, hosts)
        if host not in hosts:
            hint = f"the hosts are {', '.join(hosts)}"
            raise LaunchError(f"{option} {text}: {host!r} is not a host of the job", hint=hint, value=text)
        match = _PART.fullmatch(part)
        numbers = None if match is None else match[2]
        if whole.setdefault(host, numbers is None) is not (numbers is None):
            hint = "name the whole host, or its slots"
            raise LaunchError(f"{option} {text}: {host!r} stands there twice", hint=hint, value=text)
        slots = hosts[host] if numbers is None else _slots(numbers, text, host, hosts[host], option)
        found[host] = tuple(sorted({*found.get(host, ()), *slots}))
    return found


def _host_in(part: str) -> str:
    """The host of `host` or `host:slots`; "" where there is none."""
    match = _PART.fullmatch(part)
    return match[1].strip().removeprefix("[").removesuffix("]") if match else ""


def _known_as(host: str, hosts: Mapping[str, tuple[int, ...]]) -> str:
    """`host`, or the one `user@host` of the hosts that it means."""
    with_user = [each for each in hosts if address_of(each) == host]
    return with_user[0] if host not in hosts and len(with_user) == 1 else host


def _slots(numbers: str, text: str, host: str, known: tuple[int, ...], option: str) -> tuple[int, ...]:
    slots = set[int]()
    for part in numbers.split(","):
        match = _SLOTS.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(
                f"{option} {text}: {part!r} is not a number of a slot or a range",
                hint=f"write {host}:0,2-4",
                value=text,
            )
        low, high = int(match[1]), int(match[2] or match[1])
        unknown = next((slot for slot in range(low, min(high, MOST_SLOTS) + 1) if slot not in known), None)
        if unknown is not None or high > MOST_SLOTS:
            hint = f"its slots are {', '.join(map(str, known))}"
            shown = high if unknown is None else unknown
            raise LaunchError(f"{option} {text}: {host} has no slot {shown}", hint=hint, value=text)
        slots.update(range(low, high + 1))
    return tuple(sorted(slots))


def _not_empty(hosts: Mapping[str, tuple[int, ...]], option: str) -> Hosts:
    left = {host: slots for host, slots in hosts.items() if slots}
    if not left:
        raise LaunchError("no host and no slot is left", hint=f"let {option} leave at least one", value=option)
    return left


def _count(number: int, what: str) -> str:
    return f"1 {what} is" if number == 1 else f"{number} {what}s are"
