"""Agents: who answers the prompts of a task. Environments, whose turns are run for them, and agents that run themselves."""

import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from kinlog.schemas.config import RunConfig
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import RolloutSettings
from kinlog.workers.environments import Environment, Retry, Scorer, SingleTurn, Verdict
from kinlog.workers.tasks import Item, TaskMixture

__all__ = ["AGENTS", "Agent", "Endpoint", "build_agent", "open_dataset"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an agent finds the policy, as OpenAI's clients want to be told."""

    base_url: str
    api_key: str
    """Of one rollout: what is asked with it is that rollout's, and it ends with it."""
    model: str


@runtime_checkable
class Agent(Protocol):
    """Runs a rollout by itself, with as many model calls as it likes. Siblings share it."""

    def run(self, item: Item, endpoint: Endpoint) -> Awaitable[Verdict] | Verdict:
        """Answer a row of the dataset, and return the verdict on it. Its feedback is not looked at.

        Either ``async def``, which must never block, since everything that the worker does shares its event loop; or a
        plain ``def``, which is given a thread of its own.

        Raises
        ------
        EnvironmentFailure
            Nobody can tell. The rollout is kept, and not trained on.
        """
        ...


#: The agents that a task can name. Any other is ``module:Class``.
AGENTS: Mapping[str, Callable[[Scorer, RolloutSettings], Environment]] = MappingProxyType(
    {"single_turn": SingleTurn, "retry": Retry}
)


def build_agent(agent_name: str, scorer: Scorer, settings: RolloutSettings) -> Environment | Agent:
    """Return the agent of that name.

    Parameters
    ----------
    agent_name:
        One of ``AGENTS``, or ``module:Class``, which is made as they are.
    scorer:
        Says what an answer is worth.
    settings:
        Of rollouts.

    Raises
    ------
    ConfigError
        There is no such agent, it cannot be imported or made, or it is neither environment nor agent.
    """
    if agent_name in AGENTS:
        return AGENTS[agent_name](scorer, settings)
    module, _, name = agent_name.partition(":")
    if not name:
        raise ConfigError(
            f"dataset.tasks: expected an agent of {sorted(AGENTS)}, or module:Class of your own, found {agent_name!r}"
        )
    try:
        made: object = getattr(importlib.import_module(module), name)(scorer, settings)
    except Exception as error:
        raise ConfigError(f"dataset.tasks: agent {agent_name!r} cannot be made: {error}") from error
    is_environment = callable(getattr(made, "begin", None))
    is_agent = callable(getattr(made, "run", None))
    if is_environment == is_agent:
        raise ConfigError(
            f"dataset.tasks: expected agent {agent_name!r} to have a method 'begin' (an environment, whose turns are run "
            f"for it) or 'run' (an agent, which runs itself), found {'both' if is_agent else 'neither'}"
        )
    assert isinstance(made, Environment | Agent)
    return made


def open_dataset(config: RunConfig) -> TaskMixture:
    """Return a run's dataset, once every task's agent is known.

    Raises
    ------
    ConfigError
        A task names a generator or an agent that does not exist, or its options do not fit.
    """
    dataset = TaskMixture(config.dataset)
    for task in config.dataset.tasks:
        build_agent(task.agent, dataset, config.rollout)
    return dataset
