"""What doctor calls passed."""

from __future__ import annotations

from blendrag.lab.doctor import DoctorReport, Row


def test_report_without_checks_does_not_pass() -> None:
    assert not DoctorReport("m", "A", ()).passed
    assert DoctorReport("m", "A", (Row("c", "0", "0", True),)).passed
    assert not DoctorReport("m", "A", (Row("c", "0", "0", True), Row("d", "1", "0", False))).passed
