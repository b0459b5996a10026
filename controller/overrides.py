"""Granularity overrides, held against the dataset: one for a name that no prompt has would silently do nothing."""

from collections.abc import Collection, Iterable, Mapping

from kinlog.controller.protocols import Dataset, DatasetItem, StreamingDataset
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import RolloutRecoverySettings

__all__ = ["refuse_unknown_overrides"]


def refuse_unknown_overrides(recovery: RolloutRecoverySettings, dataset: Dataset | StreamingDataset) -> None:
    """Check that every overridden task and agent has a prompt.

    The rows of a map-style dataset are looked through until all names were seen; a stream says which names it has.

    Raises
    ------
    ConfigError
        An override names a task or an agent that no prompt has. The message lists those that exist.
    """
    wanted = {
        "task_granularity_overrides": set(recovery.task_granularity_overrides),
        "agent_granularity_overrides": set(recovery.agent_granularity_overrides),
    }
    existing = _names(dataset, wanted)
    for key, names in wanted.items():
        unknown = sorted(names - set(existing[key]))
        if unknown:
            raise ConfigError(
                f"rollout_recovery.{key}: no prompt of the dataset has {', '.join(map(repr, unknown))}; those that exist: "
                f"{', '.join(sorted(existing[key]))}"
            )


def _names(
    dataset: Dataset | StreamingDataset, wanted: Mapping[str, set[str]]
) -> Mapping[str, Collection[str]]:
    if isinstance(dataset, StreamingDataset):
        return {
            "task_granularity_overrides": dataset.task_names,
            "agent_granularity_overrides": dataset.agent_names,
        }
    found: dict[str, set[str]] = {key: set() for key in wanted}
    for item in _rows(dataset):
        if all(names <= found[key] for key, names in wanted.items()):
            break
        found["task_granularity_overrides"].add(item.task_name)
        found["agent_granularity_overrides"].add(item.agent_name)
    return found


def _rows(dataset: Dataset) -> Iterable[DatasetItem]:
    return (dataset[index] for index in range(len(dataset)))
