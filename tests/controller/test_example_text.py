"""``kinlog examples --text`` shows what is at hand, and says what is not."""

import builtins
import json
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from kinlog_journal_parts import journal_in, journal_rows
from kinlog_run_fixtures import DiskRun

from kinlog.controller.cli import cli
from kinlog.lineage.scan import scan_log
from kinlog.lineage.segment import scan_segment
from kinlog.replay.examples.rows import tokens_of_step
from kinlog.replay.examples.steps import step_examples
from kinlog.schemas.events import SiblingSealed
from kinlog.schemas.journal_columns import journal_schema

#: Token ids 1 and 2 are special, and have no characters: 3 is the first of the alphabet.
_CONFIG = """\
model: {alphabet: "abc"}
dataset:
  tasks:
    - {name: sums, generator: basic_arithmetic, agent: single}
"""


def _kinlog(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def _rows(sealed: SiblingSealed) -> pa.RecordBatch:
    """Rows that say ``ab`` and answer ``c``."""
    rows = journal_rows(sealed).to_pylist()
    told = {"prompt_tokens": 2, "token_ids": [3, 4, 5]}
    return pa.RecordBatch.from_pylist([row | told for row in rows], schema=journal_schema())


@pytest.fixture
def run(tmp_path: Path) -> DiskRun:
    """Step 1 was trained on two groups; the journal has the rows of group 0, and of group 1's first sibling."""
    run = DiskRun(tmp_path / "run")
    run.story.train(run.story.finalized(), run.story.finalized())
    run.position()
    journal = journal_in(run.directory)
    for event in run.story.events:
        if isinstance(event, SiblingSealed) and (event.group_id, event.generation) != (1, 1):
            journal.append(_rows(event))
    journal.close()
    run.directory.config.write_text(_CONFIG)
    return run


def test_tokens_are_those_of_the_siblings_whose_rows_are_all_there(run: DiskRun):
    step = step_examples(scan_log(run.directory.log), 1)
    found = tokens_of_step(run.directory, step)
    assert [(t.group_id, t.generation) for t in found] == [(0, 0), (0, 1), (1, 0)]
    assert [(c.call, c.prompt_token_ids, c.completion_token_ids) for c in found[0].calls] == [
        (0, (3, 4), (5,)),
        (1, (3, 4), (5,)),
    ]
    run.close()


def test_a_row_with_another_digest_than_the_log_has_is_not_believed(run: DiskRun):
    step = step_examples(scan_log(run.directory.log), 1)
    sealed = next(event for event in run.story.events if isinstance(event, SiblingSealed))
    forged = _rows(sealed).to_pylist()
    other = [row | {"row_digest": bytes(16), "token_ids": [3, 4, 3]} for row in forged]
    journal = journal_in(run.directory, clock_us=2)
    journal.append(pa.RecordBatch.from_pylist(other, schema=journal_schema()))
    journal.close()
    assert tokens_of_step(run.directory, step)[0].calls[0].completion_token_ids == (5,)
    run.close()


def test_a_damaged_journal_segment_has_no_text(run: DiskRun):
    (segment,) = run.directory.journal.glob("rows-*")
    data = bytearray(segment.read_bytes())
    data[scan_segment(memoryview(bytes(data))).frames[1].offset + 200] ^= 1
    segment.write_bytes(data)
    assert tokens_of_step(run.directory, step_examples(scan_log(run.directory.log), 1)) == ()
    run.close()


def test_text_is_decoded_by_the_runs_tokenizer_and_what_is_not_at_hand_is_said(run: DiskRun):
    result = _kinlog("examples", str(run.directory.path), "--step", "1", "--text")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines.count('  0/0  "ab" -> "c"') == 2
    assert "  1/1  its tokens are not at hand" in lines
    assert "The log has no tokens" in result.stdout
    found = json.loads(_kinlog("examples", str(run.directory.path), "--step", "1", "--text", "--json").stdout)
    assert [len(text["calls"]) for text in found["text"]] == [2, 2, 2, 0]
    assert found["text"][0]["calls"][0] == {"call": 0, "prompt": "ab", "completion": "c"}
    run.close()


def test_without_a_configuration_tokens_are_shown_by_number(run: DiskRun):
    run.directory.config.unlink()
    result = _kinlog("examples", str(run.directory.path), "--step", "1", "--text")
    assert "  0/0  [3, 4] -> [5]" in result.stdout
    assert "Shown as token ids" in result.stdout
    run.close()


def test_where_the_dataset_is_not_installed_nothing_is_looked_up(
    run: DiskRun, monkeypatch: pytest.MonkeyPatch
):
    real = builtins.__import__

    def without_reasoning_gym(name: str, *rest: object) -> object:
        if name.startswith(("reasoning_gym", "kinlog.workers.tasks")):
            raise ModuleNotFoundError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_reasoning_gym)
    result = _kinlog("examples", str(run.directory.path), "--step", "1", "--text")
    assert result.exit_code == 0
    assert "  1/1  its tokens are not at hand" in result.stdout.splitlines()
    run.close()


def test_prompts_are_looked_up_in_the_dataset_unless_they_have_changed(run: DiskRun):
    pytest.importorskip("reasoning_gym")
    from msgspec.structs import replace

    from kinlog.controller.token_text import prompt_lookup
    from kinlog.schemas.config import load_config
    from kinlog.schemas.prompts import PromptRef
    from kinlog.workers.tasks import TaskMixture

    config = load_config(run.directory.config)
    item = TaskMixture(config.dataset)[5]
    prompt = PromptRef(
        dataset_fingerprint="",
        sample_id=item.sample_id,
        draw_index=0,
        dataset_epoch=0,
        task_name=item.task_name,
        agent_name=item.agent_name,
        content_digest=item.content_digest,
    )
    look_up = prompt_lookup(config)
    assert look_up(prompt) == item.prompt
    assert look_up(replace(prompt, content_digest=bytes(16))) is None
    assert look_up(replace(prompt, sample_id="sums/none")) is None
    run.close()
