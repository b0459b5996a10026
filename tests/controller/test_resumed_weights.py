"""With ``future_weights: discard``, nothing that weights of an undone history sampled is gone on from, in any later life."""

import pytest
from kinlog_bench import Bench
from kinlog_lives import run_config

from kinlog.schemas.orders import RolloutOrder
from kinlog.schemas.reasons import Reason


async def order_after_a_rollback(**recovery: object) -> RolloutOrder:
    """The order for a sibling that was under way at version 2, which a restart undid and training has made again."""
    bench = Bench(run_config(**{f"rollout_recovery__{key}": value for key, value in recovery.items()}))
    told = bench.story
    told.train(told.finalized())
    checkpoint = told.checkpoint()
    told.train(told.finalized())
    group_id = told.generating(siblings=1)
    told.restore(checkpoint)
    told.supersede(group_id, 0, Reason.CONTROLLER_RESTART)
    told.train(told.finalized())
    assert bench.p.weight_version == 2
    await bench.driver.drive(group_id)
    return bench.pool.calls[-1]


async def test_version_that_was_made_again_does_not_let_tokens_of_the_one_that_was_undone_pass():
    order = await order_after_a_rollback(future_weights="discard")
    assert (order.resumable_attempts, order.newest_weight_version) == ((1,), 1)


async def test_all_is_gone_on_from_where_rollouts_of_newer_weights_are_reused():
    order = await order_after_a_rollback()
    assert (order.resumable_attempts, order.newest_weight_version) == ((1,), None)


@pytest.mark.parametrize("policy", ["reuse", "discard"])
async def test_nothing_is_left_out_of_what_a_lost_worker_leaves_when_nothing_was_undone(policy: str):
    bench = Bench(run_config(rollout_recovery__future_weights=policy))
    group_id = bench.admitted(siblings=1)
    bench.pool.lose_worker(group_id, 0, 1)
    await bench.driver.drive(group_id)
    assert bench.pool.calls[-1].newest_weight_version is None
