"""The trainer: GRPO steps with AdamW over identified rows, and a checkpoint that continues them bit for bit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.settings import TrainerSettings
from kinlog.workers.grpo import TrainingRow, group_advantages, policy_loss
from kinlog.workers.model import Policy

__all__ = ["StepMetrics", "Trainer"]

_WEIGHTS_FILE = "weights.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_STATE_FILE = "trainer.json"


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What one train step did."""

    step: int
    """Steps applied so far, this one included."""
    weight_version: int
    """Version of the weights after it."""
    loss: float
    """Mean over the step's minibatches, as are the figures below."""
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    approx_kl: float
    mean_reward: float
    """Mean shaped reward of the rows."""
    rows: int
    mixed_rows: int
    """Rows whose tokens are of more than one version of the weights."""
    loss_tokens: int
    token_lag: float
    """Versions between the weights that sampled a token and those that are trained, mean over tokens with loss."""


class _TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scalar part of a trainer checkpoint."""

    step: int
    weight_version: int
    torch_rng_state_hex: str


class Trainer:
    """Trains a policy. What a step does depends on its rows, not on the order in which they are passed.

    Parameters
    ----------
    policy:
        Its model becomes the trainer's, in training mode.
    settings:
        Learning rate, clipping, minibatches and threads. The number of threads is part of what makes two runs
        bit-identical, so it is set here, for the process.
    temperature:
        The sampling temperature: captured log-probabilities are at this temperature, and so are those recomputed.
    """

    def __init__(self, policy: Policy, settings: TrainerSettings, *, temperature: float) -> None:
        torch.set_num_threads(settings.num_threads)
        self._model = policy.model.train()
        self._pad_id = policy.tokenizer.pad_id
        self._max_positions = policy.max_positions
        self._settings = settings
        self._temperature = temperature
        self._parameters = dict(self._model.named_parameters())  # tied weights occur once
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._step = 0
        self._weight_version = 0

    @property
    def steps_applied(self) -> int:
        """Train steps applied to these weights."""
        return self._step

    @property
    def weight_version(self) -> int:
        """Version of the weights: each step makes the next one."""
        return self._weight_version

    def step(self, rows: Sequence[TrainingRow]) -> StepMetrics:
        """Apply one GRPO step over ``rows``, in ``minibatches_per_step`` optimizer steps.

        Advantages are normalised over whole groups before rows are dealt to minibatches.

        Raises
        ------
        ValueError
            There are no rows, two have the same identity, or one is longer than the model.
        FloatingPointError
            A loss or gradient is not finite. The optimizer step is not taken; restore a checkpoint if earlier
            minibatches were.
        """
        ordered = self._identified(rows)
        advantages = group_advantages(
            torch.tensor([row.reward for row in ordered], dtype=torch.float64),
            [row.group_id for row in ordered],
        )
        sampled_by = [row.sampled_by for row in ordered]
        lag = self._weight_version - torch.cat(sampled_by).double()
        count = min(self._settings.minibatches_per_step, len(ordered))
        figures = [self._minibatch(ordered[place::count], advantages[place::count]) for place in range(count)]
        self._step += 1
        self._weight_version += 1
        loss, grad_norm, clip_fraction, approx_kl = (
            sum(column) / count for column in zip(*figures, strict=True)
        )
        return StepMetrics(
            step=self._step,
            weight_version=self._weight_version,
            loss=loss,
            grad_norm=grad_norm,
            clip_fraction=clip_fraction,
            approx_kl=approx_kl,
            mean_reward=sum(row.reward for row in ordered) / len(ordered),
            rows=len(ordered),
            mixed_rows=sum(len(set(versions.tolist())) > 1 for versions in sampled_by),
            loss_tokens=len(lag),
            token_lag=float(lag.mean()) if len(lag) else 0.0,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights by parameter name, float32: what engines are updated with."""
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def save(self, directory: Path) -> None:
        """Write weights, optimizer moments and counters into ``directory``, which is made if absent.

        Files are not fsynced: whoever commits the checkpoint does that for all of its files.

        Raises
        ------
        CheckpointError
            A file cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        try:
            save_file(self.state_dict(), directory / _WEIGHTS_FILE)
            save_file(self._optimizer_tensors(), directory / _OPTIMIZER_FILE)
        except SafetensorError as error:  # how safetensors tells of a full disk
            raise CheckpointError(f"{directory}: the trainer's state cannot be written: {error}") from error
        state = _TrainerState(
            step=self._step,
            weight_version=self._weight_version,
            torch_rng_state_hex=torch.get_rng_state().numpy().tobytes().hex(),
        )
        (directory / _STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))

    def load(self, directory: Path) -> None:
        """Take up what :meth:`save` wrote: the next step is, bit for bit, the one that would have followed.

        Everything is read and checked before anything is changed.

        Raises
        ------
        CheckpointError
            A file is absent or damaged, or holds other tensors than this model's.
        """
        weights = _read_tensors(directory / _WEIGHTS_FILE)
        moments = _read_tensors(directory / _OPTIMIZER_FILE)
        state = _read_state(directory / _STATE_FILE)
        expected = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        _check_shapes(directory / _WEIGHTS_FILE, expected, weights)
        expected_moments: dict[str, tuple[int, ...]] = {}
        for name, shape in expected.items():
            if f"{name}.step" in moments:  # a parameter without a gradient so far has no moments
                expected_moments |= {
                    f"{name}.step": (),
                    f"{name}.exp_avg": shape,
                    f"{name}.exp_avg_sq": shape,
                }
        _check_shapes(directory / _OPTIMIZER_FILE, expected_moments, moments)

        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                parameter.grad = None
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}.step" in moments:
                self._optimizer.state[parameter] = {
                    key: moments[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self._step = state.step
        self._weight_version = state.weight_version
        rng_state = bytearray.fromhex(state.torch_rng_state_hex)
        torch.set_rng_state(torch.frombuffer(rng_state, dtype=torch.uint8))

    def _identified(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """Return the rows in the order of their identities."""
        if not rows:
            raise ValueError("expected rows to train on, found none")
        identities = [(row.group_id, row.generation) for row in rows]
        if len(set(identities)) != len(identities):
            repeated = sorted({identity for identity in identities if identities.count(identity) > 1})
            raise ValueError(
                f"expected each sibling once, found (group, generation) {repeated} more than once"
            )
        longest = max(len(row.token_ids) for row in rows)
        if longest > self._max_positions:
            raise ValueError(f"expected rows of at most {self._max_positions} tokens, found one of {longest}")
        return sorted(rows, key=lambda row: (row.group_id, row.generation))

    def _minibatch(
        self, rows: Sequence[TrainingRow], advantages: torch.Tensor
    ) -> tuple[float, float, float, float]:
        token_ids = torch.nn.utils.rnn.pad_sequence(
            [row.token_ids for row in rows], batch_first=True, padding_value=self._pad_id
        )
        loss_mask = torch.nn.utils.rnn.pad_sequence([row.loss_mask for row in rows], batch_first=True)
        captured = torch.nn.utils.rnn.pad_sequence([row.logprobs for row in rows], batch_first=True)
        # Padding is on the right, where causal attention keeps it out of every real token: no mask is needed.
        logits = self._model(input_ids=token_ids, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits / self._temperature, dim=-1)
        result = policy_loss(
            logprobs.gather(2, token_ids[:, 1:, None]).squeeze(2),
            captured[:, 1:],
            advantages,
            loss_mask[:, 1:],
            clip_ratio_low=self._settings.clip_ratio_low,
            clip_ratio_high=self._settings.clip_ratio_high,
        )
        loss = result.loss.item()
        self._optimizer.zero_grad(set_to_none=True)
        result.loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._settings.max_grad_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"train step {self._step + 1}: expected a finite loss and gradient, found loss {loss}, norm {norm}"
            )
        self._optimizer.step()
        return loss, norm, result.clip_fraction, result.approx_kl

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{key}": tensor
            for name, parameter in self._parameters.items()
            for key, tensor in self._optimizer.state.get(parameter, {}).items()
        }


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the trainer checkpoint has no such file") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: expected a safetensors file, found {error}") from error
    return tensors


def _read_state(path: Path) -> _TrainerState:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TrainerState)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the trainer checkpoint has no such file") from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: expected the trainer's counters, found {error}") from error


def _check_shapes(
    path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, torch.Tensor]
) -> None:
    for name in sorted(expected.keys() | found.keys()):
        wanted = f"shape {expected[name]}" if name in expected else "no such tensor"
        present = f"shape {tuple(found[name].shape)}" if name in found else "no such tensor"
        if wanted != present:
            raise CheckpointError(
                f"{path}: tensor {name}: expected {wanted}, found {present}. "
                "The checkpoint is of another model: use the configuration it was made with"
            )
