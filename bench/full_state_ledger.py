"""A stand-in for what is common today: every live group in one object, dumped whole at each checkpoint.

It is the simplest honest version of a full-state ledger, and no real project's code: nothing may change while the state
is copied and written, so both are inside of the hold. It keeps the same facts of each model call as kinlog does, and the
key of its row.
"""

import copy
from pathlib import Path
from typing import TypeAlias

import torch

__all__ = ["FullStateLedger"]

CallFacts: TypeAlias = dict[str, int | str | bytes]


class FullStateLedger:
    """All live groups as one object."""

    def __init__(self) -> None:
        self.groups: dict[int, dict[int, list[CallFacts]]] = {}
        """Group -> sibling -> its model calls."""

    def seal(self, group_id: int, generation: int, *, calls: int) -> None:
        self.groups.setdefault(group_id, {})[generation] = [
            {
                "staging_key": f"{group_id}/{generation}/1/{call}",
                "parent": call - 1,
                "prompt_tokens": 200 + 300 * call,
                "completion_tokens": 280,
                "min_weight_version": 17,
                "max_weight_version": 17,
                "row_digest": (group_id * 16 + generation).to_bytes(8, "big") + call.to_bytes(8, "big"),
            }
            for call in range(calls)
        ]

    def checkpoint(self, path: Path) -> None:
        """Copy everything, and dump the copy."""
        torch.save(copy.deepcopy(self.groups), path)
