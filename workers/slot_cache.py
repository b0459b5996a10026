"""A key-value cache of fixed shape, in which each sequence of a batch owns a row and starts at column 0."""

from typing import Any

import torch

__all__ = ["SlotCache"]


class SlotCache:
    """Keys and values of ``num_slots`` sequences of up to ``max_positions`` tokens, in a transformers model's layout.

    Shapes never change while sequences come and go: a row's arithmetic is then the same whoever its neighbours are,
    and a rollout that is redone after a restart gets the same log-probabilities, bit for bit. A cache that grows, or
    that pads on the left to align sequences, regroups the sums of attention with every change of the batch.

    It duck-types the part of ``transformers.Cache`` that attention layers call.

    Parameters
    ----------
    config:
        A transformers model configuration.
    num_slots, max_positions:
        Rows, and columns of each.
    """

    is_compileable = False

    def __init__(self, config: Any, *, num_slots: int, max_positions: int) -> None:
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, num_slots, num_kv_heads, max_positions, head_size)
        self.num_slots = num_slots
        self.max_positions = max_positions
        self._keys = torch.zeros(shape, dtype=torch.float32)
        self._values = torch.zeros(shape, dtype=torch.float32)
        self._columns = torch.arange(max_positions)
        self._rows = torch.arange(num_slots).unsqueeze(1)
        self._slot: int | None = None
        self._positions = self._rows

    def point_at_slot(self, slot: int, num_tokens: int) -> torch.Tensor:
        """Direct the next forward pass, of shape ``(1, num_tokens)``, to columns 0 and on of row ``slot``.

        Returns the additive attention mask, float32 ``(1, 1, num_tokens, max_positions)``.
        """
        self._slot = slot
        self._positions = torch.arange(num_tokens).unsqueeze(0)
        return self._mask()

    def copy_slot(self, source: int, target: int) -> None:
        """Give row ``target`` what row ``source`` holds: siblings begin with the same prompt."""
        self._keys[:, target] = self._keys[:, source]
        self._values[:, target] = self._values[:, source]

    def point_at_all(self, positions: torch.Tensor) -> torch.Tensor:
        """Direct the next forward pass, of shape ``(num_slots, 1)``, to column ``positions[row]`` of every row.

        Parameters
        ----------
        positions:
            int64, ``(num_slots, 1)``.

        Returns the additive attention mask, float32 ``(num_slots, 1, 1, max_positions)``.
        """
        self._slot = None
        self._positions = positions
        return self._mask()

    def _mask(self) -> torch.Tensor:
        hidden = self._columns > self._positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=torch.float32)
        return mask.masked_fill_(hidden, torch.finfo(torch.float32).min).unsqueeze(1)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, and return all of the pass's rows.

        Parameters
        ----------
        keys, values:
            float32, ``(batch, kv_heads, tokens, head_size)``.

        Returns
        -------
        keys, values:
            float32, ``(batch, kv_heads, max_positions, head_size)``; columns past a sequence's end are masked.
        """
        all_keys, all_values = self._keys[layer_idx], self._values[layer_idx]
        if self._slot is not None:
            row = slice(self._slot, self._slot + 1)
            all_keys[row, :, : keys.shape[2]] = keys
            all_values[row, :, : values.shape[2]] = values
            return all_keys[row], all_values[row]
        all_keys[self._rows, :, self._positions] = keys.transpose(1, 2)
        all_values[self._rows, :, self._positions] = values.transpose(1, 2)
        return all_keys, all_values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions and mask are passed explicitly, so models must not derive them from the cache."""
        return 0
