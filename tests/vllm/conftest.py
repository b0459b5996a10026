"""The tests of vLLM: those of the engine run in vLLM's environment, those of whole runs start it from their own."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engine that the others share is killed last."""
    items.sort(key=lambda item: item.path.name == "test_engine_death.py")
