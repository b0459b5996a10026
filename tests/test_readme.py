"""The README's code runs, and prints what the README says it prints."""

import re
import subprocess
import sys
from collections import ChainMap
from pathlib import Path

import msgspec
import yaml

from kinlog.schemas.config import RunConfig, parse_config

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def test_library_example_prints_what_the_readme_shows(tmp_path: Path):
    program = next(block for block in blocks("python") if "asyncio.run" in block)
    shown = README.split(program)[1].split("```text\n")[1].split("```")[0]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_arrow_example_reads_a_segment(tmp_path: Path):
    program = next(block for block in blocks("python") if "pyarrow.ipc" in block)
    library = next(block for block in blocks("python") if "asyncio.run" in block)
    subprocess.run(
        [sys.executable, "-c", library.replace("runs/library", "runs/first")], cwd=tmp_path, check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "seq_count" in done.stdout


def test_smallest_configuration_and_recovery_section_are_accepted():
    smallest, *sections = (yaml.safe_load(block) for block in blocks("yaml"))
    assert {key for section in sections for key in section} >= {"rollout_recovery", "rollout", "log"}
    config = parse_config(yaml.safe_dump(dict(ChainMap(smallest, *sections))))
    assert config.rollout_recovery.resolve(agent_name="retry", task_name="bits") == "prompt_group"


def test_embedded_demo_configuration_is_accepted():
    demo = Path(__file__).parent.parent / "controller" / "demo.yaml"
    config = parse_config(demo.read_text(encoding="utf-8"), source=str(demo))
    assert config == msgspec.convert(msgspec.to_builtins(config), RunConfig)
