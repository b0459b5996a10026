"""The configuration is decoded strictly, and its contradictions are refused before anything starts."""

import msgspec
import pytest
import yaml

from kinlog.schemas.config import RunConfig, config_digest, dump_config, load_config, parse_config
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.reasons import Granularity
from kinlog.schemas.settings import RolloutRecoverySettings

MINIMAL = {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum", "agent": "single"}]}}


def config_with(**sections: object) -> str:
    return yaml.safe_dump({**MINIMAL, **sections})


def test_minimal_configuration_has_recovery_on():
    config = parse_config(config_with())
    assert config.rollout_recovery.enabled
    assert config.rollout_recovery.default_granularity is Granularity.SIBLING


def test_configuration_survives_being_written_out():
    config = parse_config(config_with(seed=4, rollout={"num_generations": 3}))
    assert parse_config(dump_config(config)) == config
    assert config_digest(parse_config(dump_config(config))) == config_digest(config)


def test_digest_follows_every_value():
    changed = parse_config(config_with(trainer={"max_grad_norm": 2.0}))
    assert config_digest(changed) != config_digest(parse_config(config_with()))


def test_unknown_key_at_the_top_names_the_nearest():
    with pytest.raises(ConfigError, match=r"run.yaml: unknown key 'sede': did you mean 'seed'"):
        parse_config(config_with(sede=4), source="run.yaml")


def test_unknown_key_in_a_list_of_sections_names_path_and_nearest():
    text = yaml.safe_dump({"dataset": {"tasks": [{**MINIMAL["dataset"]["tasks"][0], "generatr": "x"}]}})
    with pytest.raises(
        ConfigError, match=r"unknown key 'dataset\.tasks\[.*\]\.generatr': did you mean 'generator'"
    ):
        parse_config(text)


SECTIONS = [
    field.name
    for field in msgspec.structs.fields(RunConfig)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
]


@pytest.mark.parametrize("section", SECTIONS)
def test_misspelt_key_of_every_section_names_path_and_nearest(section):
    content = msgspec.to_builtins(parse_config(config_with()))[section]
    key = next(iter(content))
    misspelt = {**content, f"{key}x": content[key]}
    with pytest.raises(ConfigError, match=rf"unknown key '{section}\.{key}x': did you mean '{key}'"):
        parse_config(config_with(**{section: misspelt}))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("- a\n- b\n", "found list"),
        ("", "found NoneType"),
        ("a: [", "not valid YAML"),
        (config_with(seed=-1), "seed"),
        (config_with(seed="four"), "seed"),
        (config_with(log={"durability": "sometimes"}), "durability"),
        ("{}", "dataset"),
    ],
)
def test_what_cannot_be_decoded_is_a_configuration_error_that_says_where(text, found):
    with pytest.raises(ConfigError, match=f"configuration: .*{found}"):
        parse_config(text)


def test_absent_file_and_file_that_is_not_text_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        load_config(binary)


def test_agent_override_wins_over_task_override_and_task_over_default():
    recovery = RolloutRecoverySettings(
        default_granularity=Granularity.SIBLING,
        agent_granularity_overrides={"judge": Granularity.SIBLING},
        task_granularity_overrides={"sums": Granularity.PROMPT_GROUP},
    )
    assert recovery.resolve(agent_name="judge", task_name="sums") is Granularity.SIBLING
    assert recovery.resolve(agent_name="single", task_name="sums") is Granularity.PROMPT_GROUP
    assert recovery.resolve(agent_name="single", task_name="other") is Granularity.SIBLING


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"token_capture": {"enabled": False}}, r"token_capture\.enabled"),
        ({"checkpointing": {"enabled": False}}, r"checkpointing\.enabled"),
        ({"checkpointing": {"save_data_plane": False}}, r"checkpointing\.save_data_plane"),
    ],
)
def test_recovery_without_what_it_needs_is_refused_and_named(sections, named):
    with pytest.raises(ConfigError, match=rf"rollout_recovery\.enabled is true, which needs {named}: true"):
        parse_config(config_with(**sections))
    without = config_with(rollout_recovery={"enabled": False}, **sections)
    if "token_capture" in sections:
        with pytest.raises(ConfigError, match="training is on captured tokens"):
            parse_config(without)
    else:
        assert not parse_config(without).rollout_recovery.enabled


@pytest.mark.parametrize("key", ["prefix", "turn"])
def test_resuming_without_the_journal_that_it_needs_is_refused_and_named(key):
    other = {"prefix": "turn", "turn": "prefix"}[key]
    without = {"row_journal": {"enabled": False}, "rollout_recovery": {other: "discard"}}
    with pytest.raises(
        ConfigError, match=rf"rollout_recovery\.{key} is resume, which needs row_journal\.enabled"
    ):
        parse_config(config_with(**without))
    neither = {"prefix": "discard", "turn": "discard"}
    config = parse_config(config_with(row_journal={"enabled": False}, rollout_recovery=neither))
    assert config.rollout_recovery.resumes == 0


def test_prefixes_are_not_resumed_in_a_run_that_is_to_repeat_itself():
    with pytest.raises(ConfigError, match=r"deterministic is true, and rollout_recovery\.prefix is resume"):
        parse_config(config_with(deterministic=True))
    discard = {"prefix": "discard"}
    assert (
        parse_config(config_with(deterministic=True, rollout_recovery=discard)).rollout_recovery.resumes == 3
    )


def test_interval_of_checkpoints_that_are_switched_off_is_refused():
    off = {"enabled": False, "rollout_every_s": 60}
    with pytest.raises(ConfigError, match=r"rollout_every_s is 60, and checkpointing\.enabled is false"):
        parse_config(config_with(rollout_recovery={"enabled": False}, checkpointing=off))


def test_two_tasks_of_one_name_are_refused():
    task = MINIMAL["dataset"]["tasks"][0]
    with pytest.raises(ConfigError, match="same name"):
        parse_config(yaml.safe_dump({"dataset": {"tasks": [task, {**task, "agent": "other"}]}}))


def test_step_that_could_never_be_filled_is_refused():
    with pytest.raises(ConfigError, match=r"groups_per_step is 9.*max_live_groups \(8\)"):
        parse_config(config_with(trainer={"groups_per_step": 9}, rollout={"max_live_groups": 8}))
