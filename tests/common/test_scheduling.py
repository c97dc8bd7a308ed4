"""Slices: a thread that asks for a short one has it, those it starts inherit it, and it can be given back."""

from __future__ import annotations

import ctypes
import os
import struct
import threading

import pytest

from common import scheduling

_SCHED_GETATTR = 315


def granted_slice() -> int:
    """The slice of this thread in nanoseconds, as the kernel says."""
    buffer = ctypes.create_string_buffer(56)
    ctypes.CDLL(None).syscall(_SCHED_GETATTR, 0, buffer, len(buffer), 0)  # leaves zeros where there is no such call
    return int(struct.unpack_from("=IIQiIQ", buffer)[5])


def in_a_thread(check) -> list:
    """What `check` returns in a thread of its own, so that the test's own thread keeps its slice."""
    results: list = []
    thread = threading.Thread(target=lambda: results.extend(check()))
    thread.start()
    thread.join()
    return results


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the call is that of x86_64")
def test_a_short_slice_is_asked_for_inherited_and_given_back() -> None:
    """After `prefer_latency` the kernel names the short slice, in threads started later too; then the ordinary one."""

    def check() -> list:
        before = granted_slice()
        if not scheduling.prefer_latency() or granted_slice() == before:
            return []
        inherited = in_a_thread(lambda: [granted_slice()])
        short = granted_slice()
        scheduling.prefer_throughput()
        return [before, short, *inherited, granted_slice()]

    results = in_a_thread(check)
    if not results:
        pytest.skip("this kernel has no slices to ask for (before Linux 6.12)")
    before, short, inherited, after = results
    assert short == inherited == scheduling.SHORT_SLICE_NS
    assert before == after > short


def test_where_it_cannot_be_had_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without the call the answer is no, and no error."""
    monkeypatch.setattr(scheduling.platform, "machine", lambda: "mips")
    assert scheduling.prefer_latency() is False
    assert scheduling.prefer_throughput() is False
