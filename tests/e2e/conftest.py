"""The lives of a real run that the tests of this folder look at. Each is lived once a session: it takes a minute."""

import pytest
from kinlog_e2e_lives import KilledRun, ResumedRun, live_to_the_end, live_until_killed


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> KilledRun:
    """A run that was killed in the middle of generation. Its ``copy`` is nobody's to change."""
    return live_until_killed(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="session")
def resumed(killed: KilledRun, tmp_path_factory: pytest.TempPathFactory) -> ResumedRun:
    """The same run, resumed and trained to the end."""
    return live_to_the_end(killed, tmp_path_factory.mktemp("resumed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The soak takes longest: begun last, everybody else would wait for it."""
    items.sort(key=lambda item: item.path.name != "test_soak.py")
