# SPDX-License-Identifier: Apache-2.0
"""`SequenceLayout`: the blocks of padded or packed sequences, of fixed size and as many as a sequence needs.

Shape letters: B batch, T tokens, M blocks, N tokens of a block; `...` any further axes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .blocks import check_count, indices, is_open


class SequenceLayout:
    """Blocks of `block_size` valid tokens each, counted from the start of every document.

    Padding belongs to no block, wherever it stands, so block boundaries do not move with it. Every document starts a
    block of its own, as if it were alone in the batch.

    Args:
        valid: BoolTensor `[B, T]`, False for padding.
        block_size: Tokens of a block.
        documents: Document of each token, LongTensor `[B, T]`, counted from 0 in each row and never falling along it;
            `None` for one document a row.
        num_documents: An upper bound of the number of documents in a row.

    Attributes:
        num_blocks: M, an upper bound that only depends on the shapes: blocks past the last token are empty.
        block_size: N, of sequences that are shorter than a block T, unless torch.export leaves T open.
        index_in_document: Index of each block in its document, LongTensor `[B, M]`, -1 where a block is empty; `None`
            where every row is one document.

    Raises:
        ValueError: If an argument has a wrong type, shape, dtype, device or value; the message names the argument.
    """

    is_uniform = False

    def __init__(
        self, valid: torch.Tensor, block_size: int, documents: torch.Tensor | None = None, num_documents: int = 1
    ) -> None:
        if not isinstance(valid, torch.Tensor) or valid.dim() != 2 or valid.dtype != torch.bool:
            found = f"{valid.dtype} {tuple(valid.shape)}" if isinstance(valid, torch.Tensor) else type(valid).__name__
            raise ValueError(f"valid must be a bool tensor [batch, tokens], got {found}.")
        check_count("block_size", block_size)
        if documents is not None:
            _check_documents(documents, valid)
        self.num_tokens = valid.shape[1]
        # A longer block would have empty slots alone past the tokens of the longest document.
        count = num_documents if documents is not None else 1
        if is_open(self.num_tokens):
            # One more block, which is empty: torch treats one block as a case of its own.
            self.num_blocks = (self.num_tokens + count * (block_size - 1) + block_size) // block_size
        else:
            block_size = max(1, min(block_size, self.num_tokens))
            self.num_blocks = max(1, min(self.num_tokens, (self.num_tokens + count * (block_size - 1)) // block_size))
        self.block_size = block_size
        self._valid = valid
        self.index_in_document: torch.Tensor | None = None
        position = valid.long().cumsum(dim=1) - 1
        if documents is None:
            slots = position
        else:
            slots = self._document_slots(position, documents, count)
        # Padding goes to a slot past the last one, which is dropped.
        empty = self.num_blocks * block_size
        self._slot_of_token = torch.where(valid, slots, empty)
        tokens = indices(self.num_tokens, valid.device).expand_as(slots)
        self._token_of_slot = tokens.new_full((valid.shape[0], empty + 1), self.num_tokens)
        self._token_of_slot = self._token_of_slot.scatter(1, self._slot_of_token, tokens)[:, :empty]

    def _document_slots(self, position: torch.Tensor, documents: torch.Tensor, count: int) -> torch.Tensor:
        size = self.block_size
        lengths = position.new_zeros(position.shape[0], count)
        lengths = lengths.scatter_add(1, documents, self._valid.long())
        blocks = (lengths + size - 1) // size
        first_token = lengths.cumsum(dim=1) - lengths
        first_block = blocks.cumsum(dim=1) - blocks
        position = position - first_token.gather(1, documents)
        block = first_block.gather(1, documents) + position // size
        # Every token writes the same about its block; -1 stays where there is none.
        where = torch.where(self._valid, block, self.num_blocks)
        unknown = position.new_full((position.shape[0], self.num_blocks + 1), -1)
        self.index_in_document = unknown.scatter(1, where, position // size)[:, :-1]
        return block * size + position % size

    def check_length(self, length: int, name: str) -> None:
        """Raises `ValueError` unless `length` is T; `name` names the tensor."""
        if length != self.num_tokens:
            raise ValueError(f"{name} has {length} tokens, but the layout has {self.num_tokens}.")

    def to_blocks(self, tokens: torch.Tensor) -> torch.Tensor:
        """Groups `[B, T, ...]` by block: `[B, M, N, ...]`, zero in empty slots; padding is left out.

        Zeros are gathered, not multiplied in, so that a NaN in the padding reaches nobody.
        """
        self.check_length(tokens.shape[1], "tokens")
        padded = F.pad(tokens, [0, 0] * (tokens.dim() - 2) + [0, 1])
        return _gather_tokens(padded, self._token_of_slot).unflatten(1, (self.num_blocks, self.block_size))

    def from_blocks(self, grouped: torch.Tensor) -> torch.Tensor:
        """Undoes [`SequenceLayout.to_blocks`]: `[B, T, ...]`, zero for padding."""
        slots = grouped.flatten(1, 2)
        padded = F.pad(slots, [0, 0] * (slots.dim() - 2) + [0, 1])
        return _gather_tokens(padded, self._slot_of_token)

    def token_table(self, device: torch.device) -> torch.Tensor:
        """Token of each slot of each block, int32 `[B, M, N]` on `device`; T where a slot is empty."""
        table = self._token_of_slot.to(device, torch.int32)
        return table.unflatten(1, (self.num_blocks, self.block_size)).contiguous()

    def first_blocks(self) -> torch.Tensor | None:
        """The first block of each block's document, LongTensor `[B, M]`; `None` where every row is one document."""
        if self.index_in_document is None:
            return None
        index = indices(self.num_blocks, self.index_in_document.device)
        return index - self.index_in_document.clamp(min=0)


def _check_documents(documents: torch.Tensor, valid: torch.Tensor) -> None:
    if (documents.dtype, documents.shape, documents.device) != (torch.long, valid.shape, valid.device):
        raise ValueError(
            f"documents must be {torch.long} {tuple(valid.shape)} on {valid.device}, as valid is, got "
            f"{documents.dtype} {tuple(documents.shape)} on {documents.device}."
        )


def _gather_tokens(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Takes token `index[b, s]` of each batch entry: `[B, S, ...]` from `[B, T, ...]`."""
    index = index.reshape(*index.shape, *[1] * (tokens.dim() - 2)).expand(-1, -1, *tokens.shape[2:])
    return tokens.gather(1, index)
