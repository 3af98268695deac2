"""Arguments of any characters arrive on other hosts, through a real ssh and its shell, as they were given."""

from __future__ import annotations

import json
from pathlib import Path

from host_jobs import Hosts
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SAYS = """
import json, os, sys
with open(os.path.join(os.path.dirname(__file__), os.environ["RANK"] + ".json"), "w") as file:
    json.dump([sys.argv[1:], os.environ["OURS"]], file)
"""
SHELL = st.sampled_from(" \t\n\r'\"`$\\;&|<>(){}[]*?!~#%=,@^-")
"""What means something to shells, pdsh or argparse."""
ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
ARGUMENTS = st.lists(st.text(SHELL | ANY, max_size=40), min_size=100, max_size=300, unique=True)


@settings(
    max_examples=2,  # a job each, of hundreds of arguments
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(arguments=ARGUMENTS, value=st.text(SHELL | ANY, max_size=200))
def test_arguments_arrive_as_they_are(two_hosts: Hosts, tmp_path: Path, arguments: list[str], value: str) -> None:
    (tmp_path / "train.py").write_text(SAYS)
    done = two_hosts.run(tmp_path / "train.py", "--export", f"OURS={value}", arguments=tuple(arguments))
    assert (done.returncode, done.stderr) == (0, "")
    for rank in range(3):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == [arguments, value]
