"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest

from tests.unit.lifeline_programs import Program


@pytest.fixture
def program():
    """program(code, *arguments) -> Program, killed after the test if it still runs."""
    started = []

    def start(code, *arguments):
        started.append(Program(code, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()
