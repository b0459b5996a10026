"""Identity is typed: digests frame their parts, and keys follow from identity."""

from hypothesis import given
from hypothesis import strategies as st

from kinlog.schemas.prompts import digest_bytes
from kinlog.schemas.receipts import Receipt, canonical_key, staging_key
from kinlog.schemas.rows import RowTag, inventory_digest

NUMBERS = st.integers(0, 10**6)


def test_boundaries_between_the_parts_of_a_digest_count():
    assert digest_bytes(b"ab", b"c") != digest_bytes(b"a", b"bc")
    assert digest_bytes(b"ab") != digest_bytes(b"ab", b"")


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), unique=True, max_size=20))
def test_different_identities_have_different_keys(identities):
    staging = {staging_key(*identity) for identity in identities}
    canonical = {canonical_key(*identity[:3]) for identity in identities}
    assert len(staging) == len(identities)
    assert len(canonical) == len({identity[:3] for identity in identities})
    assert not staging & canonical


def test_inventory_digest_follows_content_and_not_order():
    def tag(number: int, digest: bytes, *, done: bool = True) -> RowTag:
        return RowTag(group_id=number, generation=0, attempt=1, call=0, digest=digest, done=done)

    tags = {f"k{number}": tag(number, bytes([number]) * 16) for number in range(3)}
    backwards = dict(reversed(tags.items()))
    assert inventory_digest(tags) == inventory_digest(backwards)
    changed = {**tags, "k1": tag(1, b"x" * 16)}
    assert inventory_digest(changed) != inventory_digest(tags)
    assert inventory_digest({}) != inventory_digest(tags)
    assert inventory_digest({**tags, "k9": tag(-1, b"", done=False)}) == inventory_digest(tags)


def test_empty_receipt_counts_no_tokens():
    assert (Receipt(()).prompt_tokens, Receipt(()).completion_tokens) == (0, 0)
