"""``kinlog explain``: what to do about an error or a symptom, from the runbook that is installed with kinlog."""

import re
from pathlib import Path

import click

from kinlog.controller.command_parameters import echo_json, json_option

__all__ = ["explain_command", "runbook_sections"]

#: Beside this package both in a checkout and where kinlog is installed.
RUNBOOK = Path(__file__).parent.parent / "docs" / "runbook.md"


def runbook_sections(markdown: str) -> dict[str, str]:
    """Return the runbook's sections, each from its heading on, by their anchors: an error's code, or a symptom."""
    parts = re.split(r"^(?=##? |### )", markdown, flags=re.MULTILINE)
    return {
        _anchor(part.partition("\n")[0]): part.strip() + "\n" for part in parts if part.startswith("### ")
    }


def _anchor(heading: str) -> str:
    """Return what a link to a heading ends in, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.removeprefix("### ").lower()).replace(" ", "-")


@click.command("explain")
@click.argument("code", required=False)
@json_option()
def explain_command(code: str | None, as_json: bool) -> None:
    """Say what an error means, and what to do about it: CODE is what its message has in brackets, or a symptom.

    Without CODE, those that there are.

    \b
    Example
      kinlog explain
      kinlog explain log_damaged
      kinlog explain disk-is-full
    """
    sections = runbook_sections(RUNBOOK.read_text(encoding="utf-8"))
    if code is None:
        if as_json:
            echo_json(list(sections))
        else:
            click.echo("\n".join(sections))
        return
    section = sections.get(code.strip("[]"))
    if section is None:
        raise click.BadParameter(f"{code!r} is none of: {', '.join(sections)}", param_hint="CODE")
    if as_json:
        echo_json({"code": code, "text": section})
    else:
        click.echo(section, nl=False)
