"""The sections of a run's configuration. Every section is strict: an unknown key is an error."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kinlog.schemas.reasons import Granularity
from kinlog.schemas.receipts import MAX_MODEL_CALLS

__all__ = [
    "Settings",
    "ModelSettings",
    "VllmSettings",
    "GenerationSettings",
    "InFlightUpdates",
    "TaskSettings",
    "DatasetSettings",
    "TrainerSettings",
    "SamplerSettings",
    "RolloutSettings",
    "RolloutRecoverySettings",
    "CheckpointingSettings",
    "TokenCaptureSettings",
    "RowJournalSettings",
    "LogSettings",
    "DataPlaneSettings",
    "SupervisionSettings",
    "MetricsSettings",
    "USERS_OF_SAMPLER_SETTINGS",
]

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every configuration section."""


class ModelSettings(Settings, frozen=True, kw_only=True):
    """The policy: a local Hugging Face directory, or a small model built from its configuration."""

    path: str | None = None
    """A local Hugging Face causal-LM directory with its tokenizer; ``None`` builds a random-weight model."""
    hidden_size: PositiveInt = 96
    """Width of the random-weight model."""
    num_layers: PositiveInt = 2
    """Layers of the random-weight model."""
    num_heads: PositiveInt = 4
    """Attention heads of the random-weight model."""
    max_positions: PositiveInt = 160
    """Longest sequence in tokens: prompts, completions and feedback of a whole rollout."""
    initializer_range: PositiveFloat = 0.05
    """Standard deviation of the random weights. Much less, and a policy this small answers without reading its prompt
    for long."""
    alphabet: Annotated[str, Meta(min_length=1)] = "0123456789-,=?bgs"
    """Characters of the random-weight model's tokenizer. The fewer there are, the sooner it hits an answer."""
    seed: Seed = 0
    """Of the random weights."""


InFlightUpdates = Literal["continue", "recompute", "finish"]


class VllmSettings(Settings, frozen=True, kw_only=True):
    """How vLLM is started by each generation worker."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and activations; the trainer's weights are float32. ``auto``: as vLLM chooses for the model, which is
    16 bits wide."""
    enforce_eager: bool = False
    """No compilation and no CUDA graphs: starts sooner, generates more slowly."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that one worker's vLLM may take. Less, where a trainer or other workers are on the same
    GPU."""
    tensor_parallel_size: PositiveInt = 1
    """GPUs that one worker's model is split over, on one machine."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens. ``None``: ``model.max_positions``, or what the model was made for where that is less."""
    kv_cache_gib: PositiveFloat | None = None
    """Memory for keys and values, in GiB. ``None``: what ``gpu_memory_utilization`` leaves. On a CPU that would be a share
    of the machine's memory: say how much."""
    engine_args: dict[str, int | float | bool | str] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``, passed on as they are."""


class GenerationSettings(Settings, frozen=True, kw_only=True):
    """How completions are sampled, and by how many workers."""

    engine: Literal["torch", "vllm"] = "torch"
    """What generates."""
    num_workers: PositiveInt = 1
    """Generation workers, a process each."""
    python: str | None = None
    """Path of the interpreter that generation workers run in, of the same Python and Ray version as the run's, with
    ``kinlog[train]`` and the engine installed. ``None``: the run's own."""
    num_gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs that Ray gives to each generation worker: ``vllm.tensor_parallel_size`` with vLLM on GPUs, or less than 1 for
    several workers on one. With 0 a worker sees none."""
    max_batch_size: PositiveInt = 32
    """Sequences decoded together by one worker."""
    max_new_tokens: PositiveInt = 24
    """Limit on one model call's completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    in_flight_updates: InFlightUpdates = "continue"
    """What new weights do to model calls under way. ``continue``: they go on, with the keys and values that they have.
    ``recompute``: they go on after the new weights have read all their tokens again. ``finish``: they end first, and
    calls that come meanwhile wait for the new weights. The torch engine has ``continue`` only. In each case tokens are
    stamped with the version of the weights that sampled them."""
    vllm: VllmSettings = VllmSettings()
    """Used by engine ``vllm``."""


class TaskSettings(Settings, frozen=True, kw_only=True):
    """One procedural task of the mixture that prompts are drawn from."""

    name: str
    """The task's name: what ``task_granularity_overrides`` refers to."""
    generator: str
    """The reasoning-gym dataset that makes its rows."""
    agent: str
    """The agent that answers it: ``single_turn``, ``retry``, or ``module:Class`` of your own, an environment or an agent that
    runs itself (docs/agents.md). What ``agent_granularity_overrides`` refers to."""
    share: PositiveInt = 1
    """Relative number of rows of this task."""
    options: dict[str, int | float | bool | str] = {}
    """Passed to the reasoning-gym generator."""


class DatasetSettings(Settings, frozen=True, kw_only=True):
    """The prompts: a seeded mixture of procedural tasks."""

    size: PositiveInt = 512
    """Rows in one dataset epoch."""
    seed: Seed = 0
    """Of the rows, and of the order in which they are drawn."""
    max_epochs: PositiveInt = 1_000
    """The dataset is exhausted after this many passes."""
    tasks: Annotated[tuple[TaskSettings, ...], Meta(min_length=1)]
    """The mixture. Names are unique."""


class TrainerSettings(Settings, frozen=True, kw_only=True):
    """GRPO in torch: group-normalised advantages, a clipped ratio, AdamW."""

    max_steps: PositiveInt = 20
    """The run ends after this many optimizer steps."""
    groups_per_step: Annotated[int, Meta(ge=1, le=512)] = 4
    """Groups of one optimizer step, at most ``rollout.max_live_groups``. 512 are what one event can name."""
    learning_rate: PositiveFloat = 1e-3
    """Of AdamW."""
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    """Of AdamW."""
    clip_ratio_low: PositiveFloat = 0.2
    """The probability ratio is clipped below 1 minus this."""
    clip_ratio_high: PositiveFloat = 0.28
    """The probability ratio is clipped above 1 plus this."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    minibatches_per_step: PositiveInt = 1
    """Optimizer updates that one step is split into."""
    num_threads: PositiveInt = 1
    """Threads that torch computes with."""


class SamplerSettings(Settings, frozen=True, kw_only=True):
    """How groups are chosen for a step, and how far generation may run ahead of training. Setting what the chosen sampler
    would ignore is an error."""

    name: str = "weight_fifo"
    """``in_order``, ``windowed``, ``weight_fifo``, ``ready_first``, or ``module:Class`` of your own, which is made with
    these settings and ``groups_per_step``."""
    max_lookahead_versions: NonNegativeInt = 2
    """``in_order``: a group may be drawn for at most this many steps ahead."""
    shortfall: Literal["top_up", "shrink"] = "top_up"
    """``in_order``: whether the place of a group that left is drawn again, or its step is trained without it."""
    max_staleness_versions: NonNegativeInt = 4
    """``windowed``, ``weight_fifo``, ``ready_first``: a group whose oldest tokens are staler than this is dropped."""
    freshest_first: bool = False
    """``windowed``: prefer the freshest ready groups to the oldest."""
    max_ready_groups: PositiveInt | None = None
    """``windowed``, ``weight_fifo``, ``ready_first``: finalized groups that the replay buffer keeps. Those beyond it are
    evicted, those of the oldest weights first, and generation goes on as long as fresher ones can take their place. At
    least ``trainer.groups_per_step``. ``None``: nothing is evicted, and generation waits when the permits are used up.
    """


#: Setting -> the samplers that use it. With another one it would be ignored, which is refused.
USERS_OF_SAMPLER_SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "max_lookahead_versions": ("in_order",),
        "shortfall": ("in_order",),
        "max_staleness_versions": ("windowed", "weight_fifo", "ready_first"),
        "freshest_first": ("windowed",),
        "max_ready_groups": ("windowed", "weight_fifo", "ready_first"),
    }
)


class RolloutSettings(Settings, frozen=True, kw_only=True):
    """Groups, their siblings, and what happens when a rollout fails."""

    num_generations: Annotated[int, Meta(ge=1, le=128)] = 8
    """N: siblings of one prompt. 128 canonical rows are what one event can name."""
    max_live_groups: PositiveInt = 16
    """Permits of the buffer: groups reserved and not yet applied, dropped or parked."""
    max_inflight_siblings: PositiveInt = 64
    """The worker budget that fresh work and recovery share: at least N, where a group is redone whole."""
    sibling_timeout_s: PositiveFloat = 120.0
    """A rollout that takes longer is given up, and tried again."""
    max_infrastructure_retries: NonNegativeInt = 5
    """Failures of workers, network or data plane that a sibling may have, over all lives of the run."""
    max_data_retries: NonNegativeInt = 2
    """Failures of the sibling's own: an environment that refuses it, a result that is not valid."""
    max_controller_restarts: NonNegativeInt | None = None
    """Deaths of the controller that a sibling's attempts may be under way at. ``None``: they are charged to nobody,
    since most that are under way are innocent. With a limit, a rollout that kills the run each time is found out."""
    invalid_siblings: Literal["retry", "keep_masked"] = "retry"
    """What to do with a result that is no example (its environment failed, or its capture is poisoned): generate it
    again while the data budget lasts, or keep it at once as a row that is masked throughout."""
    spent_retry_budget: Literal["park", "drop", "train_partial", "fail_run"] = "park"
    """What becomes of a group when a sibling's budget is spent: set aside, dropped, trained with a masked placeholder
    in that sibling's place (a ``prompt_group`` group, which is whole or nothing, is parked instead), or set aside and
    the run stopped."""
    min_valid_fraction_per_group: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """A finalized group with a smaller fraction of valid siblings is dropped; one without any always is."""
    max_turns: Annotated[int, Meta(ge=1, le=MAX_MODEL_CALLS)] = 2
    """Model calls of one rollout, for agents that take several. At most as many as one event can hold the receipt of."""
    max_state_bytes: PositiveInt = 1024 * 1024
    """What an environment's state after a turn may take, for rollouts to be resumed there. A turn whose state is larger
    is not resumed."""
    retry_discount: Fraction = 0.5
    """``retry`` agent: what each call after the first multiplies the reward by."""
    length_penalty: Annotated[float, Meta(ge=0)] = 0.0
    """Shaping: reward taken away for each generated token, end tokens included."""
    format_reward: Annotated[float, Meta(ge=0)] = 0.0
    """Shaping: reward added when the last answer ended by itself and is an integer, right or wrong."""


class RolloutRecoverySettings(Settings, frozen=True, kw_only=True):
    """What a restart or a failure redoes. An agent's override wins over a task's, a task's over the default."""

    enabled: bool = True
    """Whether the run can be resumed. It then needs token capture, and checkpoints with the data plane in them."""
    default_granularity: Granularity = Granularity.SIBLING
    """What a failure or a restart redoes of a group."""
    agent_granularity_overrides: dict[str, Granularity] = {}
    """By the agent's name. It wins over the task's."""
    task_granularity_overrides: dict[str, Granularity] = {}
    """By the task's name."""
    prefix: Literal["resume", "discard"] = "resume"
    """What becomes of the tokens of a model call that a crash or a lost worker cut off. ``resume``: the sibling's next
    attempt goes on after them. Granularity ``prompt_group`` begins anew all the same."""
    turn: Literal["resume", "discard"] = "resume"
    """What becomes of the model calls that such a rollout had behind it. ``resume``: the next attempt goes on after the
    last one that was judged, if the environment can be put where it was then."""
    max_resumes: PositiveInt = 3
    """Attempts in a row that may go on from what earlier ones generated. The next begins anew."""
    missing_rows: Literal["refuse", "redispatch"] = "refuse"
    """What to do about rows that the checkpoint promised and the data plane lacks."""
    future_weights: Literal["reuse", "discard"] = "reuse"
    """What to do with rollouts made by weights newer than the restored trainer's."""
    over_capacity: Literal["keep", "evict", "refuse"] = "keep"
    """What to do when more groups are alive than ``rollout.max_live_groups`` now allows: keep them and draw nothing
    until there is room, evict as many (those for the furthest steps first, then those drawn last), or refuse to
    resume. Groups that are trained on again, since the trainer was rolled back, are not counted."""

    @property
    def resumes(self) -> int:
        """``max_resumes``, or 0 where nothing is resumed."""
        return self.max_resumes if "resume" in (self.prefix, self.turn) else 0

    def resolve(self, *, agent_name: str, task_name: str) -> Granularity:
        """Return the granularity of a prompt: resolved once, at reservation, and stored with the group."""
        if agent_name in self.agent_granularity_overrides:
            return self.agent_granularity_overrides[agent_name]
        return self.task_granularity_overrides.get(task_name, self.default_granularity)


class CheckpointingSettings(Settings, frozen=True, kw_only=True):
    """When checkpoints are taken, and how many are kept."""

    enabled: bool = True
    """Whether any are taken."""
    save_data_plane: bool = True
    """Whether the data plane's rows are in them."""
    every_steps: PositiveInt = 5
    """Optimizer steps from one trainer checkpoint to the next."""
    rollout_every_s: PositiveFloat | None = None
    """Seconds between rollout checkpoints, which are taken between those of the trainer and go with the newest of them.
    ``None``: only when asked for."""
    keep: Annotated[int, Meta(ge=2)] = 2
    """Trainer checkpoints. Of rollout checkpoints, the newest two since the last of the trainer are kept."""
    timeout_s: PositiveFloat = 120.0
    """A save of the data plane that takes longer, or a whole save of twice that, costs that checkpoint, not the run."""
    max_failures_in_a_row: PositiveInt = 5
    """Checkpoints that may fail one after the other, of both kinds together or of one by itself, before the run ends: it
    would otherwise go on, with more and more to lose, and nobody would know."""


class TokenCaptureSettings(Settings, frozen=True, kw_only=True):
    """Whether workers stage token ids, log-probabilities and weight versions of every model call."""

    enabled: bool = True
    """Training is on captured tokens, so there is no run without; the switch is there to be refused by name."""


class RowJournalSettings(Settings, frozen=True, kw_only=True):
    """Workers keep the token rows that they stage in a journal on disk, so that a kill at any moment costs no sealed
    sibling."""

    enabled: bool = True
    """Without it, siblings that were sealed after the last checkpoint are generated again at a restart, and
    ``rollout_recovery.prefix`` and ``turn`` must be ``discard``."""
    segment_bytes: Annotated[int, Meta(ge=65_536)] = 16 * 1024 * 1024
    """A segment is removed as a whole, once every row in it is durable elsewhere or gone."""
    progress_every_s: PositiveFloat = 2.0
    """Tokens of rollouts that have not ended are written down at least this often, for other attempts to go on from."""
    progress_every_tokens: PositiveInt = 1024
    """And as soon as a model call has generated so many more of them."""


class LogSettings(Settings, frozen=True, kw_only=True):
    """Durability and size of the event log."""

    durability: Literal["fsync", "interval", "os"] = "fsync"
    """``fsync``: durable before it is acknowledged. ``interval``: at most ``interval_ms`` may be lost to a power
    failure. ``os``: survives the process, not the machine."""
    interval_ms: PositiveInt = 50
    """With ``interval``: the longest pause between two syncs."""
    segment_bytes: Annotated[int, Meta(ge=65_536)] = 16 * 1024 * 1024
    """A segment that has reached this size is ended, and the next one begun."""
    history: Literal["keep", "drop"] = "keep"
    """What becomes of the events behind the oldest kept checkpoint. ``keep``: they stay for ever, compressed. ``drop``:
    they are replaced by what they amount to; the run cannot begin again from its start, and nobody can read any more
    what happened before."""


class DataPlaneSettings(Settings, frozen=True, kw_only=True):
    """TransferQueue: where token payloads live."""

    num_storage_units: PositiveInt = 2
    """Storage units, an actor each. A checkpoint loads only into as many as it was saved from."""
    call_timeout_s: Annotated[float, Meta(gt=0, lt=200)] = 30.0
    """How long one call may take. TransferQueue itself gives up after 200 s, and says less."""


class SupervisionSettings(Settings, frozen=True, kw_only=True):
    """How long the controller waits before it calls something dead or stuck."""

    probe_interval_s: PositiveFloat = 5.0
    """Pause between two health probes of workers and data plane."""
    probe_timeout_s: PositiveFloat = 30.0
    """How long a probe waits for its answer."""
    max_failed_probes: PositiveInt = 3
    """Probes in a row that may fail before the run is stopped. A generation worker that leaves one fewer unanswered is
    restarted."""
    start_timeout_s: PositiveFloat = 300.0
    """How long each phase of a start may take: the data plane, the workers, loading the trainer, publishing weights."""
    restart_timeout_s: PositiveFloat = 180.0
    """How long a worker's restart may take before the worker counts as lost."""
    stall_timeout_s: PositiveFloat = 300.0
    """The run is stopped when nothing at all was recorded for this long, saying what waits for what. Above every wait that
    is in order: ``rollout.sibling_timeout_s``, twice ``checkpointing.timeout_s``, and ``restart_timeout_s``,
    ``preemption_grace_s`` and ``max_retry_backoff_s``."""
    preemption_grace_s: PositiveFloat = 20.0
    """How long a run that is told to stop (SIGTERM, Ctrl-C) lets what is under way finish, its last checkpoint included.
    Closing takes some seconds more: whoever sends SIGKILL should wait for both."""
    retry_backoff_s: PositiveFloat = 0.5
    """Pause before a sibling's first retry; doubled for each further one."""
    max_retry_backoff_s: PositiveFloat = 30.0
    """The longest such pause."""


class MetricsSettings(Settings, frozen=True, kw_only=True):
    """Where a run's metrics go. Both need ``pip install "kinlog[metrics]"``."""

    tensorboard: bool = False
    """Write them to ``tensorboard/`` in the run's directory, once a step."""
    prometheus_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    """Serve them at ``/metrics`` on this port, on all interfaces. 0: on one that is free, which is printed."""
