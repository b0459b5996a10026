import dataclasses

import msgspec
import pytest
import torch

from kinlog.schemas.errors import CheckpointError
from kinlog.schemas.settings import TrainerSettings
from kinlog.workers.engines import GenerationRequest
from kinlog.workers.grpo import TrainingRow
from kinlog.workers.model import load_policy
from kinlog.workers.trainer import Trainer

pytest_plugins = ["kinlog_policy_fixtures"]

SETTINGS = TrainerSettings(learning_rate=1e-2, weight_decay=0.01, minibatches_per_step=2)


@pytest.fixture
def make_trainer(model_settings):
    def make(settings=SETTINGS, temperature=1.0, **model_changes):
        policy = load_policy(msgspec.structs.replace(model_settings, **model_changes))
        return Trainer(policy, settings, temperature=temperature)

    return make


def identical(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_step_changes_the_weights_and_counts(make_trainer, rows):
    trainer = make_trainer()
    before = trainer.state_dict()
    metrics = trainer.step(rows)
    assert not identical(before, trainer.state_dict())
    assert (metrics.step, metrics.weight_version, metrics.rows) == (1, 1, 6)
    assert metrics.loss_tokens == sum(int(row.loss_mask.sum()) for row in rows)
    assert (trainer.steps_applied, trainer.weight_version) == (1, 1)


def test_order_of_rows_changes_no_bit_of_the_result(make_trainer, rows):
    forwards, shuffled = make_trainer(), make_trainer()
    metrics = forwards.step(rows)
    assert shuffled.step([rows[place] for place in (4, 0, 5, 2, 1, 3)]) == metrics
    assert identical(forwards.state_dict(), shuffled.state_dict())


def test_rewarded_completion_becomes_more_likely(make_trainer, model_settings, rows):
    trainer = make_trainer(TrainerSettings(learning_rate=1e-3))
    first_group = rows[:3]
    best = max(first_group, key=lambda row: row.reward)

    def logprob(weights):
        model = load_policy(model_settings).model
        model.load_state_dict(weights)
        with torch.no_grad():
            logits = model(input_ids=best.token_ids.unsqueeze(0)).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, best.token_ids[1:, None])[best.loss_mask[1:]].sum()

    before = logprob(trainer.state_dict())
    trainer.step(first_group)
    assert logprob(trainer.state_dict()) > before


def test_group_of_equal_rewards_leaves_the_weights_alone(make_trainer, rows):
    trainer = make_trainer(TrainerSettings(learning_rate=1e-2, weight_decay=0.0))
    before = trainer.state_dict()
    trainer.step([dataclasses.replace(row, reward=0.5) for row in rows])
    assert identical(before, trainer.state_dict())


async def test_trainer_recomputes_the_logprobs_that_the_engine_captured(make_engine, make_trainer, rows):
    prompt = [5, 6, 7, 8]
    completion = await make_engine().generate(
        GenerationRequest(prompt_token_ids=prompt, max_new_tokens=12, temperature=0.8, seed=2)
    )
    padding = torch.zeros(len(prompt))
    row = TrainingRow(
        group_id=1,
        generation=0,
        token_ids=torch.cat([torch.tensor(prompt), completion.token_ids]),
        loss_mask=torch.cat([padding.bool(), torch.ones(len(completion.token_ids), dtype=torch.bool)]),
        logprobs=torch.cat([padding, completion.logprobs]),
        weight_versions=torch.cat([padding.int(), completion.weight_versions]),
        reward=1.0,
    )
    assert abs(make_trainer(temperature=0.8).step([row]).approx_kl) < 1e-6
    assert make_trainer(temperature=1.0).step([row]).approx_kl > 1e-5


def test_state_dict_is_a_copy(make_trainer, rows):
    trainer = make_trainer()
    published = trainer.state_dict()
    kept = {name: tensor.clone() for name, tensor in published.items()}
    trainer.step(rows)
    assert identical(published, kept)


def test_resumed_trainer_continues_bit_for_bit(make_trainer, rows, tmp_path):
    unbroken = make_trainer()
    for _ in range(2):
        unbroken.step(rows)
    unbroken.save(tmp_path)
    resumed = make_trainer(seed=99)
    resumed.load(tmp_path)
    assert (resumed.steps_applied, resumed.weight_version) == (2, 2)
    assert [resumed.step(rows) for _ in range(2)] == [unbroken.step(rows) for _ in range(2)]
    assert identical(resumed.state_dict(), unbroken.state_dict())


def test_loading_rolls_a_trainer_back(make_trainer, rows, tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path)
    first = trainer.step(rows)
    trainer.load(tmp_path)
    assert trainer.step(rows) == first


def test_random_state_is_restored(make_trainer, tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path)
    drawn = torch.rand(4)
    trainer.load(tmp_path)
    assert torch.equal(torch.rand(4), drawn)


def test_checkpoint_holds_no_pickle(make_trainer, rows, tmp_path):
    trainer = make_trainer()
    trainer.step(rows)
    trainer.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["optimizer.safetensors", "trainer.json", "weights.safetensors"]


def test_checkpoint_of_another_shape_is_refused_naming_the_tensor_and_changes_nothing(
    make_trainer, rows, tmp_path
):
    make_trainer(alphabet="0123456789-,=?bgsxyz").save(tmp_path)
    trainer = make_trainer()
    trainer.step(rows)
    before = trainer.state_dict()
    with pytest.raises(
        CheckpointError, match=r"tensor lm_head.weight: expected shape \(20, 32\), found shape \(23, 32\)"
    ):
        trainer.load(tmp_path)
    assert identical(before, trainer.state_dict())
    assert trainer.steps_applied == 1


def test_checkpoint_with_fewer_layers_is_refused_naming_the_tensor(make_trainer, tmp_path):
    make_trainer(num_layers=1).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.*found no such tensor"):
        make_trainer().load(tmp_path)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "trainer.json"])
def test_absent_or_damaged_file_is_refused_by_name(make_trainer, rows, tmp_path, name):
    trainer = make_trainer()
    trainer.step(rows)
    trainer.save(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:-9])
    with pytest.raises(CheckpointError, match=name):
        trainer.load(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        trainer.load(tmp_path)


def test_loss_that_is_not_finite_is_refused_and_leaves_the_weights_alone(make_trainer, rows):
    trainer = make_trainer(TrainerSettings())
    before = trainer.state_dict()
    poisoned = dataclasses.replace(rows[0], logprobs=torch.full_like(rows[0].logprobs, float("nan")))
    with pytest.raises(FloatingPointError, match="finite loss"):
        trainer.step([poisoned, *rows[1:]])
    assert identical(before, trainer.state_dict())
    assert trainer.steps_applied == 0


def test_same_sibling_twice_is_refused(make_trainer, rows):
    with pytest.raises(ValueError, match=r"\(11, 0\)"):
        make_trainer().step([*rows, rows[0]])


def test_trainer_sees_which_tokens_came_from_which_weights(make_trainer, rows):
    trainer = make_trainer()
    trainer.step(rows)
    trainer.step(rows)
    versions = rows[0].weight_versions.clone()
    versions[-1] = 2  # the last token of one row is of the weights that are trained
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    metrics = trainer.step([dataclasses.replace(rows[0], weight_versions=versions), *rows[1:]])
    assert metrics.mixed_rows == 1
    assert metrics.token_lag == pytest.approx(2 * (tokens - 1) / tokens)


def test_step_without_rows_is_refused(make_trainer):
    with pytest.raises(ValueError, match="found none"):
        make_trainer().step([])


def test_row_longer_than_the_model_is_refused(make_trainer):
    row = TrainingRow(
        group_id=1,
        generation=0,
        token_ids=torch.full((49,), 5),
        loss_mask=torch.zeros(49, dtype=torch.bool),
        logprobs=torch.zeros(49),
        weight_versions=torch.zeros(49, dtype=torch.int32),
        reward=0.0,
    )
    with pytest.raises(ValueError, match="at most 48 tokens, found one of 49"):
        make_trainer().step([row])
