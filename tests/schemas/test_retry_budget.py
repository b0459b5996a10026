"""The retry budget of older logs, which knows no restarts, is read as one that charges none."""

import msgspec

from kinlog.schemas.events import RetryBudget


def test_budget_without_restarts_charges_none():
    old = msgspec.msgpack.encode([5, 2])
    assert msgspec.msgpack.decode(old, type=RetryBudget) == RetryBudget(5, 2, None)


def test_budget_with_a_limit_on_restarts_is_written_and_read_as_it_is():
    budget = RetryBudget(5, 2, 3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(budget), type=RetryBudget) == budget
