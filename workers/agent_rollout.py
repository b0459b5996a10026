"""A rollout that an agent runs by itself: it is given an endpoint, and what it asks there is the rollout."""

import asyncio
import inspect

from kinlog.schemas.settings import RolloutSettings
from kinlog.workers.agent_session import AgentSession
from kinlog.workers.agents import Agent, Endpoint
from kinlog.workers.environments import EnvironmentFailure, Verdict
from kinlog.workers.loop_thread import start_blocking
from kinlog.workers.model_calls import ModelCalls
from kinlog.workers.openai_endpoint import OpenAIEndpoint
from kinlog.workers.rollout import Rollout, ended_rollout
from kinlog.workers.tasks import Item

__all__ = ["run_agent"]


async def run_agent(
    calls: ModelCalls, endpoint: OpenAIEndpoint, agent: Agent, item: Item, *, settings: RolloutSettings
) -> Rollout:
    """Run one sibling to its end. Cancelling it ends what the agent may ask at once, and the agent soon after.

    Parameters
    ----------
    calls:
        Makes the model calls.
    endpoint:
        Where the agent asks for them.
    agent:
        Who asks.
    item:
        The row of the dataset.
    settings:
        The shaping that is applied.

    Raises
    ------
    ValueError
        The reward is not finite, or no model call was made.
    TypeError
        The agent returned something other than a verdict.
    Exception
        Whatever the agent raised; or the engine's failure, whatever the agent made of it.
    """
    async with endpoint.serve(calls) as (address, session):
        running = _start(agent, item, address)
        try:
            # Waited for, and not awaited: an agent that cleans up for long, or a thread that does not end, is left to
            # itself when the rollout is given up.
            await asyncio.wait({running})
        finally:
            running.cancel()
    return ended_rollout(calls, _verdict(running, session, item), item, settings=settings)


def _start(agent: Agent, item: Item, endpoint: Endpoint) -> "asyncio.Future[Verdict]":
    running: asyncio.Future[Verdict]
    if inspect.iscoroutinefunction(agent.run):
        running = asyncio.create_task(agent.run(item, endpoint), name=f"agent of {item.sample_id}")
    else:
        # Not one of a pool: a few agents that wait would keep all others waiting.
        thread = start_blocking(f"agent of {item.sample_id}", lambda: agent.run(item, endpoint))
        running = asyncio.wrap_future(thread)  # type: ignore[arg-type]
    running.add_done_callback(
        lambda ended: ended.cancelled() or ended.exception()
    )  # looked at, if left alone
    return running


def _verdict(running: "asyncio.Future[Verdict]", session: AgentSession, item: Item) -> Verdict | None:
    if session.failure is not None:
        raise session.failure
    if running.cancelled():
        raise RuntimeError(f"the agent of sample {item.sample_id!r} cancelled itself")
    error = running.exception()
    if isinstance(error, EnvironmentFailure):
        return None
    if error is not None:
        raise error
    verdict = running.result()
    if not isinstance(verdict, Verdict):
        raise TypeError(
            f"expected the agent of sample {item.sample_id!r} to return a Verdict, found {type(verdict).__name__}"
        )
    return verdict
