"""A run's configuration: one YAML file, decoded strictly."""

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import yaml
from msgspec import Meta

from kinlog.schemas.errors import ConfigError
from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.reasons import Granularity
from kinlog.schemas.settings import (
    USERS_OF_SAMPLER_SETTINGS,
    CheckpointingSettings,
    DataPlaneSettings,
    DatasetSettings,
    GenerationSettings,
    LogSettings,
    MetricsSettings,
    ModelSettings,
    RolloutRecoverySettings,
    RolloutSettings,
    RowJournalSettings,
    SamplerSettings,
    Settings,
    SupervisionSettings,
    TokenCaptureSettings,
    TrainerSettings,
)

__all__ = ["RunConfig", "load_config", "parse_config", "dump_config", "config_digest"]

T = TypeVar("T")


class RunConfig(Settings, frozen=True, kw_only=True):
    """Everything that a run is started with."""

    run_dir: str = "runs/kinlog"
    """Where the run's log and checkpoints live. Relative paths are relative to the working directory."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Of the trainer and of every rollout."""
    deterministic: bool = False
    """Refuse operations of torch that may give another result each time, in trainer and generation workers. With
    ``sampler: {name: in_order, max_lookahead_versions: 0}`` a run that is killed ends with the very weights of one that
    is not. Needs ``rollout_recovery.prefix: discard``."""
    model: ModelSettings = ModelSettings()
    generation: GenerationSettings = GenerationSettings()
    dataset: DatasetSettings
    trainer: TrainerSettings = TrainerSettings()
    sampler: SamplerSettings = SamplerSettings()
    rollout: RolloutSettings = RolloutSettings()
    rollout_recovery: RolloutRecoverySettings = RolloutRecoverySettings()
    checkpointing: CheckpointingSettings = CheckpointingSettings()
    token_capture: TokenCaptureSettings = TokenCaptureSettings()
    row_journal: RowJournalSettings = RowJournalSettings()
    log: LogSettings = LogSettings()
    data_plane: DataPlaneSettings = DataPlaneSettings()
    supervision: SupervisionSettings = SupervisionSettings()
    metrics: MetricsSettings = MetricsSettings()


def load_config(path: Path, *, engine: str | None = None) -> RunConfig:
    """Read and check a configuration file. ``engine`` is put in the place of ``generation.engine``.

    Raises
    ------
    ConfigError
        The file is absent or not YAML, a key is unknown (the nearest valid one is named), a value has the wrong type
        or is out of range, or the sections contradict each other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8: {error}") from error
    return parse_config(text, source=str(path), engine=engine)


def parse_config(text: str, *, source: str = "configuration", engine: str | None = None) -> RunConfig:
    """Decode and check a configuration text. ``source`` is what errors call it; for ``engine`` see :func:`load_config`."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping of sections, found {type(data).__name__}")
    if engine is not None:
        generation = data.get("generation") or {}
        data["generation"] = {**generation, "engine": engine} if isinstance(generation, dict) else generation
    try:
        config = msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error))}") from error
    _check_sections(config, source)
    return config


def dump_config(config: RunConfig) -> str:
    """Return the configuration as YAML, with every default written out."""
    return str(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))


def config_digest(config: RunConfig) -> bytes:
    """Return the digest of everything in the configuration, defaults included."""
    return digest_bytes(msgspec.json.encode(config, order="deterministic"))


def _check_sections(config: RunConfig, source: str) -> None:
    recovery, checkpointing = config.rollout_recovery, config.checkpointing
    if recovery.enabled:
        needs = "rollout_recovery.enabled is true, which needs"
        because = "a restart can only reuse siblings whose tokens were captured and saved"
        if not config.token_capture.enabled:
            raise ConfigError(f"{source}: {needs} token_capture.enabled: true; found false. {because}.")
        if not (checkpointing.enabled and checkpointing.save_data_plane):
            key = "enabled" if not checkpointing.enabled else "save_data_plane"
            raise ConfigError(f"{source}: {needs} checkpointing.{key}: true; found false. {because}.")
        _check_resuming(config, source)
    elif not config.token_capture.enabled:
        raise ConfigError(f"{source}: token_capture.enabled is false, and training is on captured tokens")
    if checkpointing.rollout_every_s is not None and not checkpointing.enabled:
        raise ConfigError(
            f"{source}: checkpointing.rollout_every_s is {checkpointing.rollout_every_s:g}, and checkpointing.enabled is "
            "false: there would be none. Leave one of them out."
        )
    if len({task.name for task in config.dataset.tasks}) != len(config.dataset.tasks):
        raise ConfigError(f"{source}: dataset.tasks: two tasks have the same name; names identify tasks")
    _check_generation(config, source)
    _check_sampler(config.sampler, source)
    _check_waits(config, source)
    rollout = config.rollout
    if config.trainer.groups_per_step > rollout.max_live_groups:
        raise ConfigError(
            f"{source}: trainer.groups_per_step is {config.trainer.groups_per_step}, more than "
            f"rollout.max_live_groups ({rollout.max_live_groups}): a step could never be filled"
        )
    _check_ready_groups(config, source)
    granularities = {
        recovery.resolve(agent_name=task.agent, task_name=task.name) for task in config.dataset.tasks
    }
    if Granularity.PROMPT_GROUP in granularities and rollout.num_generations > rollout.max_inflight_siblings:
        raise ConfigError(
            f"{source}: rollout.max_inflight_siblings is {rollout.max_inflight_siblings}, and a group of granularity "
            f"prompt_group runs rollout.num_generations ({rollout.num_generations}) siblings at once"
        )


def _check_resuming(config: RunConfig, source: str) -> None:
    recovery = config.rollout_recovery
    if recovery.resumes and not config.row_journal.enabled:
        key = "prefix" if recovery.prefix == "resume" else "turn"
        raise ConfigError(
            f"{source}: rollout_recovery.{key} is resume, which needs row_journal.enabled: true; found false. What "
            "unfinished rollouts have generated is kept beside it. Set prefix and turn to discard, or switch it on."
        )
    if config.deterministic and recovery.prefix == "resume":
        raise ConfigError(
            f"{source}: deterministic is true, and rollout_recovery.prefix is resume: reading a prefix at once rounds "
            "otherwise than generating it token by token, so the weights would depend on when the run was killed. Set "
            "rollout_recovery.prefix: discard. Turns can be resumed."
        )


#: Arguments of vLLM that the engine sets itself, from other keys or because captured tokens depend on them.
_OWN_ENGINE_ARGS = frozenset(
    {
        "model",
        "dtype",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "tensor_parallel_size",
        "max_model_len",
        "max_num_seqs",
        "logprobs_mode",
        "skip_tokenizer_init",
        "generation_config",
        "worker_extension_cls",
        "disable_log_stats",
    }
)


def _check_generation(config: RunConfig, source: str) -> None:
    generation = config.generation
    if generation.engine == "torch":
        if generation.in_flight_updates != "continue":
            raise ConfigError(
                f"{source}: generation.in_flight_updates is {generation.in_flight_updates}, and generation.engine torch has "
                "continue only. Leave it out, or set generation.engine: vllm."
            )
        return
    own = sorted(_OWN_ENGINE_ARGS & generation.vllm.engine_args.keys())
    if own:
        raise ConfigError(
            f"{source}: generation.vllm.engine_args: {', '.join(own)} cannot be passed on: the engine sets it itself, "
            "from other keys of generation or so that what is captured is right"
        )
    if config.deterministic:
        raise ConfigError(
            f"{source}: deterministic is true, and generation.engine is vllm, whose log-probabilities depend in their last "
            "bits on what else is in the batch. Set deterministic: false, or generation.engine: torch."
        )
    parallel = generation.vllm.tensor_parallel_size
    if (
        generation.num_gpus > 0
        and generation.num_gpus != parallel
        and (parallel > 1 or generation.num_gpus > 1)
    ):
        raise ConfigError(
            f"{source}: generation.num_gpus is {generation.num_gpus:g}, and a worker's model is split over "
            f"generation.vllm.tensor_parallel_size ({parallel}) of them: set both to the same, or num_gpus below 1 for "
            "several workers on one GPU"
        )


def _check_ready_groups(config: RunConfig, source: str) -> None:
    limit, wanted = config.sampler.max_ready_groups, config.trainer.groups_per_step
    if limit is not None and limit < wanted:
        raise ConfigError(
            f"{source}: sampler.max_ready_groups is {limit}, less than trainer.groups_per_step ({wanted}): what a step "
            "needs would be evicted before it is complete"
        )


def _check_waits(config: RunConfig, source: str) -> None:
    """Refuse waits that are in order, and that the watchdog would take for a stall."""
    stall_timeout_s = config.supervision.stall_timeout_s
    for key, wait_s, what in (
        ("twice checkpointing.timeout_s", 2 * config.checkpointing.timeout_s, "a slow save"),
        ("rollout.sibling_timeout_s", config.rollout.sibling_timeout_s, "a single long rollout"),
        (
            "supervision.max_retry_backoff_s",
            config.supervision.max_retry_backoff_s,
            "a single pause before a retry",
        ),
        (
            "supervision.restart_timeout_s",
            config.supervision.restart_timeout_s,
            "a single restart of a worker",
        ),
        (
            "supervision.preemption_grace_s",
            config.supervision.preemption_grace_s,
            "waiting for what is about to finish",
        ),
    ):
        if stall_timeout_s <= wait_s:
            raise ConfigError(
                f"{source}: supervision.stall_timeout_s is {stall_timeout_s:g}, not above {key} ({wait_s:g}): {what} "
                "would end the run"
            )


def _check_sampler(sampler: SamplerSettings, source: str) -> None:
    """Refuse a setting that the chosen sampler would ignore. One of the user's own may use them all."""
    if ":" in sampler.name:
        return
    for field in msgspec.structs.fields(SamplerSettings):
        users = USERS_OF_SAMPLER_SETTINGS.get(field.name)
        if users is None or sampler.name in users or getattr(sampler, field.name) == field.default:
            continue
        raise ConfigError(
            f"{source}: sampler.{field.name} is {getattr(sampler, field.name)}, which sampler {sampler.name!r} does not "
            f"use; {', '.join(users)} would. Leave it out, or set sampler.name."
        )


_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?")


def _explain(message: str) -> str:
    """Turn a decoding error into one that names the key, and for a misspelt key the nearest valid one."""
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown is None:
        return message
    path = (unknown["path"] or "").lstrip(".")
    known = _fields_at(RunConfig, path)
    name = f"{path}.{unknown['key']}" if path else unknown["key"]
    nearest = difflib.get_close_matches(unknown["key"], known, n=1, cutoff=0.0)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"unknown key {name!r}: {hint}Valid keys here: {', '.join(known)}"


def _fields_at(root: type[msgspec.Struct], path: str) -> list[str]:
    """Return the field names of the section at a path such as ``dataset.tasks[...]``."""
    here: Any = msgspec.inspect.type_info(root)
    for step in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        if step.startswith("["):
            here = getattr(here, "item_type", None) or getattr(here, "value_type", here)
        else:
            here = next(f.type for f in here.fields if f.encode_name == step)
    return [f.encode_name for f in getattr(here, "fields", ())]
