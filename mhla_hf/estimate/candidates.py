# SPDX-License-Identifier: Apache-2.0
"""Models that may become MHLA, known by their configurations alone: built, sized and fed without weights."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench import cast_model
from ..families.inputs import example_inputs
from ..integrations.transformers.configuration import max_positions
from ..integrations.transformers.limits import check_sizes
from ..integrations.transformers.modules import is_image_model, patch_grid
from ..integrations.transformers.towers import towers_of
from ..layouts import MAX_TOKENS
from ..models.directory import ModelDirectory
from ..models.limits import check_model_config
from ..models.registry import FAMILIES, family_for
from ..presets import PRESETS, from_preset, is_preset
from ..utils import locations
from ..utils.compat.transformers import set_attention
from ..utils.messages import check_count, shorten_list, shorten_text


_CONFIGURATIONS = ["model_index.json", "config.json", "*/config.json"]


class Candidate(ABC):
    """A model as its configuration describes it, whether MHLA supports it or not.

    Args:
        directory: Its configurations.
        config: Its configuration: a dict for diffusers, an object for transformers.

    Attributes:
        name: Directory, Hub id or name of a preset.
        class_name: Class of the softmax model.
        is_linear: Whether the model's own attention is linear.
        window: Width of the sliding window that some layers have, or `None`.
    """

    is_linear = False
    window: int | None = None

    def __init__(self, directory: ModelDirectory, config: Any) -> None:
        self.directory, self.config = directory, config
        self.name, self.class_name = directory.location, directory.class_name

    @abstractmethod
    def build(self, mhla: Mapping[str, Any] | None = None, *, one_block: bool = False) -> Any:
        """Build the model on the current device.

        Args:
            mhla: Options of its MHLA version; `None` for the softmax model.
            one_block: Leave out all transformer blocks but the first of each list.

        Raises:
            ValueError: If it has sizes that no model has, or MHLA does not support it.
        """

    @abstractmethod
    def grid(self, **given: int) -> tuple[int, ...]:
        """Return the tokens along each axis of a sample; what is not given is the model's own.

        Args:
            **given: `tokens` (the length of a text, or tokens of an image or video), or `height` and `width` in pixels
                and `num_frames`.

        Raises:
            ValueError: If the model does not have what is given, or nothing tells the size.
        """

    @abstractmethod
    def inputs(self, model: Any, grid: Sequence[int], dtype: Any, device: Any, text: int = 0) -> dict[str, Any]:
        """Random arguments of the model's `forward`; `text` counts tokens of prompts."""

    def options(self, grid: Sequence[int]) -> dict[str, Any]:
        """Options of MHLA for samples of a size, beside the defaults; none for text."""
        return {"grid": list(grid)} if len(grid) > 1 else {}

    @abstractmethod
    def family(self, model: Any) -> str | None:
        """Family of recipes for the MHLA version of the model; `None` where there is none."""


def on_meta(
    candidate: Candidate, mhla: Mapping[str, Any] | None = None, dtype: Any = torch.bfloat16, **options: Any
) -> Any:
    """Build a model without memory for its weights; see [`Candidate.build`].

    Raises:
        ValueError: As there, and for whatever libraries raise for wrong values in a configuration.
    """
    try:
        with torch.device("meta"):
            model = candidate.build(mhla, **options)
    except (ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(
            f"{candidate.name}: no {candidate.class_name} can be built of its configuration "
            f"({shorten_text(f'{type(error).__name__}: {error}', 300)}): correct its values."
        ) from error
    if dtype is not None:
        cast_model(model, dtype)
    return model


class DiffusionModel(Candidate):
    """A transformer of diffusers."""

    def __init__(self, directory: ModelDirectory, config: Any) -> None:
        super().__init__(directory, config)
        self.is_linear = self.class_name in FAMILIES and directory.original_attention == "linear"

    def build(self, mhla: Mapping[str, Any] | None = None, *, one_block: bool = False) -> Any:
        upstream = self.directory.load_class()
        check_model_config(upstream, self.config, self.name)
        config = dict(self.config)
        if one_block:
            # One of each list of blocks.
            others = {"num_single_layers": 1, "vace_layers": [0]}
            config |= {"num_layers": 1, **{name: value for name, value in others.items() if name in config}}
        if mhla is not None:
            upstream, config["mhla"] = family_for(self.class_name).load_class(), dict(mhla)
        return upstream.from_config(config).eval()

    def grid(self, **given: int) -> tuple[int, ...]:
        return self.directory.sample_grid(**given)

    def inputs(self, model: Any, grid: Sequence[int], dtype: Any, device: Any, text: int = 0) -> dict[str, Any]:
        return example_inputs(model, grid, dtype, device, text=text)

    def family(self, model: Any) -> str | None:
        return family_for(self.class_name).training


class TransformersModel(Candidate):
    """A language model, encoder or vision model of transformers."""

    def __init__(self, directory: ModelDirectory, config: Any) -> None:
        super().__init__(directory, config)
        text = config.get_text_config()
        self.window = getattr(text, "sliding_window", None) or getattr(text, "local_attention", None)

    def build(self, mhla: Mapping[str, Any] | None = None, *, one_block: bool = False) -> Any:
        import transformers

        config = copy.deepcopy(self.config)
        found = getattr(transformers, self.class_name, None) or transformers.MODEL_MAPPING.get(type(config), None)
        if found is None:
            raise ValueError(f"{self.class_name} is not in transformers {transformers.__version__}.")
        if one_block:
            config.num_hidden_layers = 1
            if getattr(config, "layer_types", None):
                config.layer_types = ["full_attention"]
        if mhla is not None:
            config.mhla = dict(mhla)
            set_attention(config, "mhla")
            return found(config).eval()
        model = found(config).eval()
        for part in (model.config, *towers_of(model.config).values()):
            # Undeclared too: it is counted, not computed.
            set_attention(part, "sdpa")
        return model

    def grid(self, **given: int) -> tuple[int, ...]:
        if is_image_model(self.config):
            if not given.keys() <= {"height", "width"}:
                raise ValueError(f"{self.class_name} sees images: give height and width.")
            return patch_grid(self.config, **given)
        if not given.keys() <= {"tokens"}:
            raise ValueError(f"{self.class_name} reads text: give tokens.")
        length = given.get("tokens") or max_positions(self.config.get_text_config())
        if length is None:
            raise ValueError("tokens must be given: the configuration does not tell the longest text.")
        return (length,)

    def inputs(self, model: Any, grid: Sequence[int], dtype: Any, device: Any, text: int = 0) -> dict[str, Any]:
        taken = inspect.signature(model.forward).parameters
        if is_image_model(self.config):
            patch = self.config.patch_size
            sides = [
                size * side for size, side in zip(grid, patch if isinstance(patch, (list, tuple)) else 2 * [patch])
            ]
            pixels = torch.randn(1, self.config.num_channels, *sides, dtype=dtype, device=device)
            resized = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in taken else {}
            return {"pixel_values": pixels, **resized}
        inputs: dict[str, Any] = {"input_ids": torch.zeros(1, *grid, dtype=torch.long, device=device)}
        if self.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"][:, :1]
        if "logits_to_keep" in taken:
            inputs["logits_to_keep"] = 1
        return inputs

    def family(self, model: Any) -> str | None:
        options = model.config.mhla
        if options is None:
            # Several towers, each with options of its own.
            return None
        return "causal" if options["causal"] else "vision" if is_image_model(self.config) else "encoder"


def find_candidate(location: str | Path, component: str | None = None, **hub: Any) -> Candidate:
    """Read the configuration of a model, whether MHLA supports it or not.

    Args:
        location: A directory, a Hub id (only configurations are downloaded), or the name of a preset.
        component: Name of the model in a pipeline; by default its first transformer.
        **hub: `revision`, `token` and `cache_dir`, for a Hub repository.

    Raises:
        ValueError: If there is none, or the model is MHLA already.
    """
    name = str(location)
    if is_preset(name):
        with torch.device("meta"):
            made = from_preset(name, mhla=False)
        if PRESETS[name].library == "transformers":
            return TransformersModel(ModelDirectory(name, Path(), None, {"model": made.to_dict()}, "model"), made)
        config = {**made.config, "_class_name": type(made).__name__}
        return DiffusionModel(ModelDirectory(name, Path(), None, {"transformer": config}, "transformer"), config)
    root = locations.local_directory(location, "model")
    if root is None:
        try:
            root = locations.download_repository(name, allow_patterns=_CONFIGURATIONS, **hub)
        except OSError as error:
            for same in (preset for preset, content in PRESETS.items() if content.repository == name):
                error.args = (f"{error} The preset {same} is the same model, and needs no download.",)
            raise
    directory = ModelDirectory.read(root, component, location=name, require_supported=False)
    if directory.is_mhla:
        raise ValueError(f"{name} is MHLA already: give the model that it was converted from.")
    if directory.is_transformers:
        # Before the configuration is loaded, which may make a list of all layers.
        check_sizes(directory.config, name)
        return TransformersModel(directory, directory.load_config())
    return DiffusionModel(directory, directory.config)


def find_grid(candidate: Candidate, **size: int | None) -> tuple[int, ...]:
    """Return the token grid of a size that a user gives; see [`Candidate.grid`].

    Raises:
        ValueError: If a number is wrong, or tokens are given with a size in pixels.
    """
    given = {name: value for name, value in size.items() if value is not None}
    for name, value in given.items():
        check_count(name, value, maximum=MAX_TOKENS)
    if "tokens" in given and len(given) > 1:
        raise ValueError(f"tokens cannot be given with {shorten_list(name for name in given if name != 'tokens')}.")
    # A configuration that no model can be built of is reported here.
    on_meta(candidate)
    return candidate.grid(**given)
