# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings of transformers models, undone and applied again around the feature map.

Attention functions see queries and keys after RoPE. With `rope="after_feature_map"` they are rotated back, mapped, and
the features are rotated, all with the model's own `apply_rotary_pos_emb`: any order of the rotated pairs works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ...utils.compat.transformers import global_of, names_used, rotation_conditions


# Attention classes whose rotation was found to be invertible the way `Rotation` does it.
_CHECKED: set[type] = set()


def rotation_of(attention: nn.Module) -> Callable[..., Any] | None:
    """Returns the function that an attention class rotates with, or None where none is found."""
    return global_of(type(attention).forward, "apply_rotary_pos_emb")


def uses_rotary(attention: nn.Module) -> bool:
    """Returns whether an attention module rotates its queries and keys inside its `forward`."""
    if getattr(attention, "use_rope", True) in (False, 0):
        # Some models leave single layers without positions, and hand them angles all the same.
        return False
    return any("rotary" in name or "rope" in name for name in names_used(type(attention).forward))


def rotates_sometimes(attention: nn.Module) -> bool:
    """Returns whether an attention class rotates under a condition other than its `use_rope`, so that calls differ."""
    return not hasattr(attention, "use_rope") and bool(rotation_conditions(type(attention).forward))


@dataclass(frozen=True)
class Rotation:
    """One call's rotation by the angles whose cosine and sine the model computed.

    Scaled embeddings (YaRN and others) multiply both by a factor s. Queries and keys keep it, features do not: their
    rotation is a pure one, so that numerator and normaliser stay in proportion.

    Attributes:
        apply: `apply_rotary_pos_emb(query, key, cos, sin)` on `[B, H, T, R]`.
        cos: `[B or 1, T, R]`; R is less than the head width where only its first part is rotated.
        sin: Like `cos`.
    """

    apply: Callable[..., Any]
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def _scale(self) -> torch.Tensor:
        """s as `[B or 1, T, R]`, for each pair by itself: half precision rounds cosine and sine."""
        return (self.cos.float().square() + self.sin.float().square()).sqrt()

    def rotate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, T, H, K]` without scaling."""
        return self._turn(tokens, self.cos / self._scale, self.sin / self._scale)

    def undo(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rotates `[B, T, H, K]` back; a scale that was applied stays applied."""
        return self._turn(tokens, self.cos / self._scale, -self.sin / self._scale)

    def _turn(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        width = cos.shape[-1]
        cos, sin = cos.to(tokens.dtype), sin.to(tokens.dtype)
        rotated = tokens[..., :width].transpose(1, 2)
        # The function takes a query and a key; one head stands in for the key.
        rotated = self.apply(rotated, rotated[:, :1], cos, sin)[0].transpose(1, 2)
        return torch.cat([rotated, tokens[..., width:]], dim=-1) if width < tokens.shape[-1] else rotated


def make_rotation(attention: nn.Module, position_embeddings: Any, query: torch.Tensor) -> Rotation:
    """Builds the rotation of one call, and checks it once for each attention class.

    Args:
        attention: The attention module.
        position_embeddings: The argument of that name of the module.
        query: The rotated queries `[B, T, H, K]` to check on.

    Raises:
        ValueError: If the embeddings are not cosine and sine `[B, T, R]`, or rotating back and forth does not return
            the query.
    """
    name, apply = type(attention).__name__, rotation_of(attention)
    pair = isinstance(position_embeddings, (tuple, list)) and len(position_embeddings) == 2
    if apply is None or not pair or any(part.dim() != 3 for part in position_embeddings):
        raise ValueError(
            f"{name} has rotary embeddings that cannot be undone; use mhla={{'rope': 'before_feature_map'}}."
        )
    rotation = Rotation(apply, *position_embeddings)
    if type(attention) not in _CHECKED and not torch.compiler.is_compiling() and not query.is_meta:
        sample = query[:1, :, :1].detach().float()
        partial = Rotation(apply, *(part[:1].detach() for part in position_embeddings))
        if not torch.allclose(partial.rotate(partial.undo(sample)), sample, rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"The rotary embeddings of {name} are not undone by their inverse; "
                "use mhla={'rope': 'before_feature_map'}."
            )
        _CHECKED.add(type(attention))
    return rotation
