"""Prompt references: which row of which dataset a group was drawn from, without its text."""

import hashlib
from typing import Annotated

import msgspec

__all__ = ["Digest", "DIGEST_BYTES", "digest_bytes", "PromptRef", "MAX_NAME_BYTES"]

DIGEST_BYTES = 16

#: BLAKE2b with a 16-byte digest: 2**64 work to collide, and small enough to record for every model call.
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]

#: Limit on a sample id, a task name and an agent name, in UTF-8: three of them fit into one event.
MAX_NAME_BYTES = 1024


def digest_bytes(*parts: bytes) -> bytes:
    """Return the BLAKE2b-128 digest of ``parts``, each framed by its length so that boundaries count."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


class PromptRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of the dataset, by reference: it is resolved again through the dataset at restart.

    Fields are compared as typed values. ``sample_id`` is opaque and may hold any text that UTF-8 can encode; it is
    never parsed, nor joined with anything to make an identity.
    """

    dataset_fingerprint: str
    """Digest (hex) of the dataset's definition: another dataset is refused at restart."""
    sample_id: str
    """The dataset's own name of the row."""
    draw_index: int
    """Position in the run's draw order, from 0, over all dataset epochs."""
    dataset_epoch: int
    """How many whole passes over the dataset came before this draw."""
    task_name: str
    """The task of the mixture that the row belongs to."""
    agent_name: str
    """``extra_env_info.agent_ref.name`` of the row."""
    content_digest: Digest
    """BLAKE2b-128 of the prompt and what it is verified against: a changed row is refused at restart."""
