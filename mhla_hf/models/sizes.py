# SPDX-License-Identifier: Apache-2.0
"""How large a sample is: in pixels, in latents of the VAE, in tokens of the transformer. Integers only."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


# The factor of a VAE, or the side of a patch, is far below.
_MOST = 4096
_MOST_STAGES = 12


@dataclass(frozen=True)
class SampleSize:
    """What turns the size of a sample into its token grid, and back.

    Attributes:
        vae: Frames, of which the first frame is one, and pixels of a side per latent. Images ignore the frames.
        patch: Latents per token along each axis: frames (of videos only), height and width.
    """

    vae: tuple[int, int]
    patch: tuple[int, ...]

    @property
    def token(self) -> tuple[int, int]:
        """Pixels per token along height and width."""
        return self.vae[1] * self.patch[-2], self.vae[1] * self.patch[-1]

    def grid(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return the number of tokens of a sample along each axis, frames first."""
        frames = [((num_frames - 1) // self.vae[0] + 1) // each for each in self.patch[:-2]]
        return (*frames, height // self.token[0], width // self.token[1])

    def pixels(self, grid: Sequence[int]) -> dict[str, int]:
        """Return `height`, `width` and, of videos, `num_frames` of a token grid."""
        height, width = (length * side for length, side in zip(grid[-2:], self.token))
        frames = [(length * each - 1) * self.vae[0] + 1 for length, each in zip(grid, self.patch[:-2])]
        return {"height": height, "width": width, **({"num_frames": frames[0]} if frames else {})}

    def check(self, height: int, width: int, num_frames: int = 1) -> None:
        """Check that latents and patches divide a size.

        Raises:
            ValueError: If they do not; the message names the size.
        """
        rows, columns = self.token
        is_video = len(self.patch) == 3
        if height % rows or width % columns or (num_frames - 1) % (self.vae[0] if is_video else _MOST):
            frames = f", frames a multiple of {self.vae[0]} plus 1" if is_video else ""
            raise ValueError(
                f"sizes: for this pipeline height must be a multiple of {rows}, width of {columns}{frames}; got "
                f"{height},{width},{num_frames}"
            )


def vae_factors(config: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    """Return the frames, and the pixels of a side, per latent; `None` for what a VAE's configuration does not tell.

    Args:
        config: Contents of the VAE's `config.json`.
        where: Name of the file, for errors.

    Raises:
        ValueError: If an entry is not a number that VAEs have.
    """
    computed: tuple[int | None, int | None] = (None, None)
    stages = config.get("encoder_block_out_channels") or config.get("block_out_channels")
    if isinstance(scaling := config.get("spatio_temporal_scaling"), list):
        # The VAEs of LTX compute what their configurations leave open.
        sides = (("patch_size_t", 1), ("patch_size", 4))
        frames, pixels = (check_size(config.get(name) or least, name, where) for name, least in sides)
        factor = 2 ** sum(map(bool, scaling[:_MOST_STAGES]))
        computed = (frames * factor, pixels * factor)
    elif stages is not None:
        if not isinstance(stages, list) or len(stages) > _MOST_STAGES:
            raise ValueError(f"{where}: 'block_out_channels' must be a list of 1 to {_MOST_STAGES} numbers.")
        computed = (None, 2 ** (len(stages) - 1))
    found = []
    for axis, own in zip(("temporal", "spatial"), computed):
        names = (f"scale_factor_{axis}", f"{axis}_compression_ratio")
        stated = (check_size(config[name], name, where) for name in names if config.get(name) is not None)
        found.append(next(stated, own))
    return found[0], found[1]


def patch_sizes(model_class: Any, config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the latents that make one token of a diffusion transformer, along each axis.

    Args:
        model_class: A class of diffusers, supported or not, or an MHLA class.
        config: Its configuration; what is left out has the constructor's default.
        where: Name of the configuration, for errors.

    Raises:
        ValueError: If an entry is not a number that models have.
    """
    if packs_latents(model_class):
        return (2, 2)
    parameters = inspect.signature(model_class.__init__).parameters
    patch: Any
    patch, frames = (
        config[name] if config.get(name) is not None else parameters[name].default if name in parameters else 1
        for name in ("patch_size", "patch_size_t")
    )
    axes = 3 if "patch_size_t" in parameters or "3D" in model_class.__name__ else 2
    is_list = isinstance(patch, (list, tuple)) and len(patch) == axes
    sides = patch if is_list else (frames or 1, patch, patch)[-axes:]
    return tuple(check_size(side, "patch_size", where) for side in sides)


def packs_latents(model_class: Any) -> bool:
    """Return whether a diffusion transformer takes latents that its pipeline packed, 2 × 2 in each token."""
    taken = inspect.signature(model_class.forward).parameters
    return not taken.keys().isdisjoint(("img_ids", "img_shapes"))


def check_size(value: Any, name: str, where: str, most: int = _MOST) -> int:
    """Return a positive integer of a configuration; `ValueError` with the file's name for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{where}: {name!r} must be an integer from 1 to {most:,}, got {value!r:.40}.")
    return value
