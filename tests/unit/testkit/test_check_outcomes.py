"""What a failed row of the check says: the error that a rank ended with, and what cures it."""

from __future__ import annotations

import json

import pytest

from polyaccel.registry import PluginGroup
from polyaccel.testkit.contract import BrokenPromise, run_test
from polyaccel.testkit.loading import LoadingContract
from polyaccel.testkit.training.torch_launched import _last

TORCHRUN = """\
[polyaccel, rank 1] warning: uncaught AttributeError; the last calls are in /tmp/x
[rank1]: Traceback (most recent call last):
[rank1]:   File "<frozen runpy>", line 198, in _run_module_as_main
[rank1]: AttributeError: 'Collective' object has no attribute 'op'
[rank0]: Traceback (most recent call last):
[rank0]:   File "train.py", line 3, in <module>
[rank0]: polyaccel.errors.CommError: rank 1 is gone
[rank0]:   hint: look for the error of that rank
[rank0]:   File "train.py", line 3, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  error_file: <N/A>
"""


def test_an_error_of_ours_is_shown_with_its_cure_and_no_traceback() -> None:
    assert _last(TORCHRUN).splitlines() == [
        "[rank0]: polyaccel.errors.CommError: rank 1 is gone",
        "[rank0]:   hint: look for the error of that rank",
    ]


def test_without_one_the_first_error_of_a_rank_is_shown() -> None:
    said = "\n".join(line for line in TORCHRUN.splitlines() if "rank0" not in line)
    assert _last(said) == "[rank1]: AttributeError: 'Collective' object has no attribute 'op'"


def test_without_any_error_the_last_lines_are_shown() -> None:
    assert _last("one\ntwo") == "one\ntwo"
    assert _last("") == "no output"


def test_the_cure_of_a_broken_promise_is_apart_from_what_was_found() -> None:
    def broken() -> None:
        raise BrokenPromise("the probe raised", hint="say why not")

    outcome = run_test("test_broken", broken)
    assert (outcome.state, outcome.reason, outcome.hint) == ("failed", "the probe raised", "say why not")
    with pytest.raises(AssertionError) as caught:
        broken()
    assert str(caught.value) == "the probe raised\n  hint: say why not"


@pytest.mark.parametrize("ends", ["with an error of ours", "with another", "as absent"])
def test_a_probe_that_fails_says_what_cures_it(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = json.dumps({"usable": False, "reason": "no such chip", "loaded": []})
    programs = {
        "with an error of ours": "raise polyaccel.errors.PluginContractError('its probe lies', hint='let it tell')",
        "with another": "raise ValueError('nothing there')",
        "as absent": f"print({absent!r})",
    }
    program = f"import polyaccel.errors\nprint('loaded')\n{programs[ends]}"
    monkeypatch.setattr("polyaccel.testkit.loading._PROGRAM", program)
    contract = LoadingContract(PluginGroup.MONITORS, "acme", 30)
    test = contract.test_it_can_be_used_here if ends == "as absent" else contract.test_the_probe_answers
    outcome = run_test("test", test)
    reason, hint = {
        "with an error of ours": ("probing it: its probe lies", "let it tell"),
        "with another": ("probing it: ValueError: nothing there", "fix what probing it runs"),
        "as absent": ("cannot be used here: no such chip", "fix what is missing here"),
    }[ends]
    assert outcome.state == "failed"
    assert outcome.reason == reason
    assert outcome.hint.startswith(hint)
