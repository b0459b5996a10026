"""The logs that are damaged, as they were when all was well."""

import pytest
from kinlog_damage_oracle import Files, killed_log, lived_log, tiny_log


@pytest.fixture(scope="session")
def tiny() -> Files:
    return tiny_log()


@pytest.fixture(scope="session")
def lived() -> Files:
    return lived_log()


@pytest.fixture(scope="session")
def killed() -> Files:
    return killed_log()
