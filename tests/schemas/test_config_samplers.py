"""A sampler's settings: one that the chosen sampler would ignore is refused, and said who uses it."""

import pytest
import yaml

from kinlog.schemas.config import RunConfig, dump_config, parse_config
from kinlog.schemas.errors import ConfigError
from kinlog.schemas.settings import USERS_OF_SAMPLER_SETTINGS, SamplerSettings

TASKS = {"dataset": {"tasks": [{"name": "sums", "generator": "chain_sum", "agent": "single"}]}}
NOT_THE_DEFAULT = {
    "max_lookahead_versions": 7,
    "shortfall": "shrink",
    "max_staleness_versions": 9,
    "freshest_first": True,
    "max_ready_groups": 16,
}
SAMPLERS = ["in_order", "windowed", "weight_fifo", "ready_first"]


def parsed(**sampler: object) -> RunConfig:
    return parse_config(yaml.safe_dump({**TASKS, "sampler": sampler}), source="run.yaml")


def test_every_setting_says_who_uses_it():
    assert set(USERS_OF_SAMPLER_SETTINGS) == set(SamplerSettings.__struct_fields__) - {"name"}
    assert set(NOT_THE_DEFAULT) == set(USERS_OF_SAMPLER_SETTINGS)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("setting", NOT_THE_DEFAULT)
def test_setting_that_the_sampler_would_ignore_is_refused_and_its_users_named(name: str, setting: str):
    users = USERS_OF_SAMPLER_SETTINGS[setting]
    given = {"name": name, setting: NOT_THE_DEFAULT[setting]}
    if name in users:
        assert getattr(parsed(**given).sampler, setting) == NOT_THE_DEFAULT[setting]
        return
    with pytest.raises(
        ConfigError, match=rf"run\.yaml: sampler\.{setting} .*'{name}' does not use"
    ) as caught:
        parsed(**given)
    assert all(user in str(caught.value) for user in users)


@pytest.mark.parametrize("name", SAMPLERS)
def test_default_that_is_written_out_is_not_refused(name: str):
    config = parsed(name=name)
    assert parse_config(dump_config(config)) == config


def test_sampler_of_ones_own_may_use_every_setting():
    assert parsed(name="somewhere:Mine", **NOT_THE_DEFAULT).sampler.freshest_first
