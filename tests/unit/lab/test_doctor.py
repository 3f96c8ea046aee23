"""What doctor calls passed."""

from __future__ import annotations

from blendrag.lab.doctor import Check, DoctorReport


def test_report_without_checks_does_not_pass() -> None:
    assert not DoctorReport("m", "A", ()).passed
    assert DoctorReport("m", "A", (Check("c", "0", "0", True),)).passed
    assert not DoctorReport("m", "A", (Check("c", "0", "0", True), Check("d", "1", "0", False))).passed
