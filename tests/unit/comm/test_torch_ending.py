"""A process waits for gloo's threads to rest before the interpreter ends."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Callable

import pytest

from polyaccel.comm.torch_group import wait_for_rest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell of threads")
PR_SET_NAME = 15


def named(work: Callable[[], object]) -> tuple[threading.Thread, threading.Event]:
    """A thread that the system calls what gloo's are called, and an event that it sets when it has its name."""
    begun = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        begun.set()
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    return thread, begun


def test_a_thread_that_sleeps_is_at_rest() -> None:
    ends = threading.Event()
    thread, _ = named(ends.wait)
    try:
        assert wait_for_rest()
    finally:
        ends.set()
        thread.join()


def test_one_that_works_is_waited_for() -> None:
    ends = threading.Event()

    def work() -> None:
        while not ends.is_set():  # half a second without the interpreter's lock, for which it would sleep
            hashlib.pbkdf2_hmac("sha256", b"a word", b"salt", 2_000_000)

    thread, _ = named(work)
    assert not wait_for_rest(limit_s=0.2)
    ends.set()
    assert wait_for_rest(limit_s=100.0)
    thread.join()
