"""`polyaccel doctor` is what people paste into reports: it says that the job has a secret, and not which."""

from __future__ import annotations

import pytest

from polyaccel.cli.doctor import libraries
from polyaccel.job.auth import SECRET_VARIABLE
from polyaccel.redaction import HIDDEN


def test_the_jobs_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of this job")
    monkeypatch.setenv("POLYACCEL_LOG", "info")
    found = libraries.variables()
    assert found["POLYACCEL_LOG"] == "info"
    assert found[SECRET_VARIABLE] == HIDDEN
