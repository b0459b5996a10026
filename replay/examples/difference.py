"""Whether two runs were trained on the same examples in the same order, and where they part."""

from collections.abc import Iterator, Mapping

import msgspec

from kinlog.replay.examples.steps import GroupExamples, SiblingExample, StepExamples
from kinlog.replay.plain_text import format_count, render_table

__all__ = ["Difference", "Comparison", "compare_examples", "render_comparison"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that two runs did not train on alike."""

    train_step: int
    place: int | None
    """Place of the group in its step, from 0; ``None`` when it is about the step as a whole."""
    generation: int | None
    what: str
    first: str
    second: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two surviving histories side by side."""

    steps_compared: int
    groups_compared: int
    siblings_compared: int
    only_in_first: tuple[int, ...]
    """Steps that only the first run has."""
    only_in_second: tuple[int, ...]
    differences: tuple[Difference, ...]
    """In the order of training: the first one is where the runs part."""

    @property
    def same(self) -> bool:
        """Whether every step that either run has was trained on the same examples in the same order."""
        return not (self.differences or self.only_in_first or self.only_in_second)


def compare_examples(first: Mapping[int, StepExamples], second: Mapping[int, StepExamples]) -> Comparison:
    """Compare what two runs were trained on, step by step, group by group, sibling by sibling.

    An example is its content: the prompt, and for each sibling the canonical row's digest, which covers every token,
    mask, log-probability, weight version and reward. How often it took to make it is no part of it.
    """
    both = sorted(first.keys() & second.keys())
    return Comparison(
        steps_compared=len(both),
        groups_compared=sum(len(first[step].groups) for step in both),
        siblings_compared=sum(len(group.siblings) for step in both for group in first[step].groups),
        only_in_first=tuple(sorted(first.keys() - second.keys())),
        only_in_second=tuple(sorted(second.keys() - first.keys())),
        differences=tuple(
            difference for step in both for difference in _step_differences(first[step], second[step])
        ),
    )


def _step_differences(first: StepExamples, second: StepExamples) -> Iterator[Difference]:
    step = first.train_step
    if len(first.groups) != len(second.groups):
        counts = (format_count(len(each.groups), "group") for each in (first, second))
        yield _difference(step, None, None, "number of groups", *counts)
        return
    drawn = [[group.prompt.draw_index for group in each.groups] for each in (first, second)]
    if drawn[0] != drawn[1] and sorted(drawn[0]) == sorted(drawn[1]):
        yield _difference(step, None, None, "order of groups", *(_some(indices) for indices in drawn))
        return
    for place, (one, other) in enumerate(zip(first.groups, second.groups, strict=True)):
        yield from _group_differences(step, place, one, other)


def _group_differences(
    step: int, place: int, first: GroupExamples, second: GroupExamples
) -> Iterator[Difference]:
    if first.prompt != second.prompt:
        prompts = (f"{p.sample_id!r}, draw {p.draw_index}" for p in (first.prompt, second.prompt))
        yield _difference(step, place, None, "prompt", *prompts)
        return
    one, other = ({s.generation: s for s in group.siblings} for group in (first, second))
    for generation in sorted(one.keys() | other.keys()):
        sibling, its_other = one.get(generation), other.get(generation)
        if sibling is None or its_other is None:
            described = ("missing" if each is None else "there" for each in (sibling, its_other))
            yield _difference(step, place, generation, "sibling", *described)
        elif sibling.row_digest != its_other.row_digest:
            yield _difference(step, place, generation, *_what_differs(sibling, its_other))


def _what_differs(first: SiblingExample, second: SiblingExample) -> tuple[str, str, str]:
    """Return the plainest of the facts that differ."""
    for name, unit in (
        ("min_weight_version", "weight version"),
        ("max_weight_version", "weight version"),
        ("validity", "validity"),
        ("completion_tokens", "completion tokens"),
        ("raw_reward", "raw reward"),
        ("shaped_reward", "shaped reward"),
    ):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            return unit, str(one), str(other)
    return "tokens or log-probabilities", first.row_digest, second.row_digest


def _difference(
    step: int, place: int | None, generation: int | None, what: str, first: str, second: str
) -> Difference:
    return Difference(
        train_step=step, place=place, generation=generation, what=what, first=first, second=second
    )


def _some(numbers: list[int]) -> str:
    return "draws " + ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")


def render_comparison(comparison: Comparison, *, limit: int | None = 10) -> str:
    """Return the comparison as text, with up to ``limit`` differences, ``None`` for all."""
    compared = (
        f"compared {format_count(comparison.steps_compared, 'step')}, "
        f"{format_count(comparison.groups_compared, 'group')}, "
        f"{format_count(comparison.siblings_compared, 'sibling')}"
    )
    if comparison.same:
        return f"{compared}\n\nSAME: every step was trained on the same examples in the same order"
    parts = [compared]
    for which, steps in (("first", comparison.only_in_first), ("second", comparison.only_in_second)):
        if steps:
            parts.append(f"only the {which} run has {_step_ranges(steps)}")
    shown = comparison.differences[:limit]
    if shown:
        rows = [
            (
                str(d.train_step),
                "" if d.place is None else str(d.place),
                "" if d.generation is None else str(d.generation),
                d.what,
                d.first,
                d.second,
            )
            for d in shown
        ]
        titles = ("step", "place", "generation", "what differs", "first run", "second run")
        parts.append(render_table(titles, rows, right=(0, 1, 2), indent=2))
    more = len(comparison.differences) - len(shown)
    if more:
        parts.append(f"and {format_count(more, 'more difference')}: --all lists them")
    where = comparison.differences[0].train_step if comparison.differences else None
    parts.append(
        "DIFFERENT" + (f": the runs part at step {where}" if where is not None else ": one run is longer")
    )
    return "\n\n".join(parts)


def _step_ranges(steps: tuple[int, ...]) -> str:
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    spans = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges)
    return f"step{'s' if len(steps) > 1 else ''} {spans}"
