"""A machine that exists only on paper."""

from __future__ import annotations

import pytest

from blendrag.control.estimate import Estimator
from blendrag.control.profile import Profile
from paper_machine import make_profile


@pytest.fixture(scope="session")
def profile() -> Profile:
    return make_profile()


@pytest.fixture(scope="session")
def estimate(profile: Profile) -> Estimator:
    return Estimator.of(profile)
