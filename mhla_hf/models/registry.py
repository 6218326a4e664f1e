# SPDX-License-Identifier: Apache-2.0
"""The registry of supported models: MHLA classes by diffusers class, and the tested architectures of transformers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..utils.compat import check_version
from ..utils.messages import check_choice


LIBRARY = "mhla_hf"
"""Library of MHLA models in the index of a pipeline, and the name of the stub in their folders on the Hub."""

TRANSFORMERS_DATA = Path(__file__).with_name("transformers_families.json")
"""Results of `python -m tests.integrations.transformers.family_sweep`, which builds every transformers model at tiny
size and compares it with itself. The tests of the same name keep the file up to date."""


@dataclass(frozen=True)
class ModelFamily:
    """Everything that is known of one supported architecture of diffusers without importing it.

    Attributes:
        name: Short name, in commands and recipes too.
        title: Name of its models in texts.
        kind: Kind of output, `"video"` or `"image"`.
        module: Module of `mhla_hf.families` that defines the MHLA class.
        upstream: Name of the diffusers class.
        pipelines: Diffusers pipelines that the family was tested in.
        refused_pipelines: Those that call the transformer with more than a text, and cannot be recovered or trained.
        note: Remarks for users, or an empty string.
        trained_as: Name of the family whose objective and recipes it takes, if not its own.
        objective: Class of its training objective, in the same module; an empty string without one.
        trained_by: What the objective is.
        recipe: Name of its block in `recovery/defaults.yaml`, or an empty string if `recover` does not take it.
        data_free: Whether it is calibrated and matched on the inputs of its model while the pipeline makes samples.
        call_samples: Samples in one call of its model, on average; above 1 where the pipeline computes a sample with
            its prompt and without in one call.
        text_tokens: Tokens that captions are padded to in training; 0 without text or an objective.
        negative_prompts: Whether validation samples take a negative prompt.
        two_transformers: Whether pipelines may have a `transformer_2`.
        vae: Frames, and pixels of a side, per latent of the usual VAE.
    """

    name: str
    title: str
    kind: str
    module: str
    upstream: str
    pipelines: tuple[str, ...]
    refused_pipelines: tuple[str, ...] = ()
    note: str = ""
    trained_as: str = ""
    objective: str = ""
    trained_by: str = "flow matching"
    recipe: str = ""
    data_free: bool = False
    call_samples: float = 1
    text_tokens: int = 0
    negative_prompts: bool = False
    two_transformers: bool = False
    vae: tuple[int, int] = (4, 8)

    @property
    def training(self) -> str:
        """Name of the family of its objective and recipes."""
        return self.trained_as or self.name

    @property
    def mhla_class(self) -> str:
        """Name of the MHLA class."""
        return f"MHLA{self.upstream}"

    def load_class(self) -> Any:
        """Import the MHLA class; `ImportError` without a supported version of diffusers."""
        return self._load(self.mhla_class)

    def load_objective(self) -> Any:
        """Return its objective as it is without a pipeline; see `load_class`."""
        return self._load(self.objective)()

    def _load(self, name: str) -> Any:
        check_version("diffusers")
        return getattr(importlib.import_module(f"mhla_hf.families.{self.module}"), name)


@dataclass(frozen=True)
class TransformersFamily:
    """One architecture of transformers.

    Attributes:
        name: Its `model_type`.
        kind: `"language model"`, `"multi-modal"`, `"encoder"` or `"vision"`.
        note: Remarks for users, the reason for a refusal, or an empty string.
        rope: Default position of its rotary embeddings, if it has any; see [`mhla_hf.MHLAConfig`].
    """

    name: str
    kind: str
    note: str = ""
    rope: str = "after_feature_map"


def _read_transformers(status: str) -> dict[str, TransformersFamily]:
    models = json.loads(TRANSFORMERS_DATA.read_text(encoding="utf-8"))["models"]
    # A name may stand for several kinds, such as BERT as a decoder and as an encoder: the last one counts.
    return {
        entry["name"]: TransformersFamily(entry["name"], entry["kind"], entry["note"], rope=entry["rope"])
        for entry in models
        if entry["status"] == status
    }


_KEYFRAMES = "no keyframes beside the grid"
_LINEAR = "linear already: the same {} until fine-tuned"
# fmt: off
_WAN = ModelFamily(
    "wan", "Wan", "video", "wan", "WanTransformer3DModel", ("WanPipeline", "WanImageToVideoPipeline"),
    recipe="wan", objective="WanObjective", text_tokens=512, negative_prompts=True, two_transformers=True)
_FLUX = ModelFamily(
    "flux", "Flux.1", "image", "flux", "FluxTransformer2DModel", ("FluxPipeline",),
    ("FluxKontextPipeline", "FluxKontextInpaintPipeline"), "no reference images",
    recipe="joint", objective="FluxObjective", data_free=True, text_tokens=512)
_FAMILIES = (
    _WAN,
    replace(
        _WAN, name="wan-vace", title="Wan-VACE", upstream="WanVACETransformer3DModel", pipelines=("WanVACEPipeline",),
        recipe="video", objective="WanVACEObjective", trained_by="flow matching, from text alone", data_free=True),
    ModelFamily("wan-animate", "Wan-Animate", "video", "wan", "WanAnimateTransformer3DModel", ("WanAnimatePipeline",)),
    replace(
        _WAN, name="skyreels-v2", title="SkyReels-V2", upstream="SkyReelsV2Transformer3DModel", trained_as="wan",
        pipelines=("SkyReelsV2Pipeline", "SkyReelsV2ImageToVideoPipeline", "SkyReelsV2DiffusionForcingPipeline"),
        note="no causal blocks"),
    ModelFamily(
        "ltx", "LTX-Video", "video", "ltx", "LTXVideoTransformer3DModel", ("LTXPipeline", "LTXImageToVideoPipeline"),
        ("LTXConditionPipeline", "LTXImageToVideoPipeline", "LTXI2VLongMultiPromptPipeline"), _KEYFRAMES,
        recipe="video", objective="LTXObjective", data_free=True, call_samples=2, text_tokens=128,
        negative_prompts=True, vae=(8, 32)),
    ModelFamily(
        "ltx2", "LTX-2", "video", "ltx", "LTX2VideoTransformer3DModel", ("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
        note=f"softmax for audio, {_KEYFRAMES}", recipe="video", data_free=True, call_samples=1.5, vae=(8, 32)),
    ModelFamily(
        "hunyuan-video", "HunyuanVideo", "video", "hunyuan_video", "HunyuanVideoTransformer3DModel",
        ("HunyuanVideoPipeline", "HunyuanVideoImageToVideoPipeline"),
        recipe="joint", objective="HunyuanVideoObjective", data_free=True, text_tokens=256),
    ModelFamily(
        "hunyuan-video-1.5", "HunyuanVideo-1.5", "video", "hunyuan_video", "HunyuanVideo15Transformer3DModel",
        ("HunyuanVideo15Pipeline",), recipe="joint", data_free=True, vae=(4, 16)),
    ModelFamily(
        "qwen-image", "Qwen-Image", "image", "qwen_image", "QwenImageTransformer2DModel", ("QwenImagePipeline",),
        note="no images to edit", recipe="joint", data_free=True),
    _FLUX,
    replace(
        _FLUX, name="chroma", title="Chroma", upstream="ChromaTransformer2DModel", pipelines=("ChromaPipeline",),
        refused_pipelines=(), note="", objective="", text_tokens=0),
    ModelFamily(
        "sd3", "Stable Diffusion 3", "image", "sd3", "SD3Transformer2DModel", ("StableDiffusion3Pipeline",),
        note="3.5 too", recipe="joint", data_free=True, call_samples=2),
    ModelFamily(
        "dit", "DiT", "image", "dit", "DiTTransformer2DModel", ("DiTPipeline",),
        recipe="dit", objective="DiTObjective", trained_by="noise prediction"),
    ModelFamily(
        "pixart", "PixArt", "image", "dit", "PixArtTransformer2DModel",
        ("PixArtAlphaPipeline", "PixArtSigmaPipeline"), recipe="pixart", data_free=True, call_samples=2),
    ModelFamily(
        "sana", "SANA", "image", "sana", "SanaTransformer2DModel", ("SanaPipeline", "SanaSprintPipeline"),
        note=_LINEAR.format("images"), recipe="sana", objective="SanaObjective", text_tokens=300,
        negative_prompts=True, vae=(4, 32)),
    ModelFamily(
        "sana-video", "SANA-Video", "video", "sana", "SanaVideoTransformer3DModel", ("SanaVideoPipeline",),
        note=_LINEAR.format("videos"), recipe="sana-video"),
)
# fmt: on

FAMILIES: dict[str, ModelFamily] = {family.upstream: family for family in _FAMILIES}
MHLA_CLASSES: dict[str, ModelFamily] = {family.mhla_class: family for family in _FAMILIES}

TRANSFORMERS_FAMILIES = _read_transformers("works")
"""The tested architectures of transformers, by `model_type`."""

RECOVERED = {family.name: family for family in _FAMILIES if family.recipe and not family.trained_as}
"""The families of diffusers with recipes of their own, by name."""

TRAINED = {name: family for name, family in RECOVERED.items() if family.objective}
"""Those with an objective of training."""

LEGACY_CLASS = "Transformer2DModel"
"""Former class in diffusers of several image models."""

# Their present classes, by the `norm_type` that tells them apart.
_LEGACY = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}


class SupportedModels(dict[str, ModelFamily | TransformersFamily]):
    """The supported architectures by name, which print as a list to read."""

    def __str__(self) -> str:
        rows = [f"{name:28}  {family.kind:14}  {describe(family)}".rstrip() for name, family in self.items()]
        return "\n".join(rows)

    __repr__ = __str__


def names_of(families: Mapping[str, ModelFamily], **facts: Any) -> tuple[str, ...]:
    """Return the names of those families that have some facts: `names_of(TRAINED, kind="video")`."""
    return tuple(name for name, family in families.items() if facts.items() <= vars(family).items())


def describe(family: ModelFamily | TransformersFamily) -> str:
    """Return a line about a family: its MHLA class, pipelines and note, as far as it has them."""
    if isinstance(family, TransformersFamily):
        return family.note
    description = f"as {family.mhla_class} in {', '.join(family.pipelines)}"
    return f"{description}; {family.note}" if family.note else description


def supported_models() -> SupportedModels:
    """Return the supported architectures: of diffusers by upstream class, of transformers by `model_type`.

    It is a dict, and prints as a list. Those of transformers were tested; others load too, with a warning, where their
    attention allows it.

    Examples:
        >>> from mhla_hf import supported_models
        >>> supported_models()["WanTransformer3DModel"].mhla_class
        'MHLAWanTransformer3DModel'
        >>> "qwen3" in supported_models()
        True
    """
    return SupportedModels({**FAMILIES, **TRANSFORMERS_FAMILIES})


def current_class(class_name: str, config: Mapping[str, Any]) -> str:
    """Return the present name in diffusers of the class of a checkpoint.

    Args:
        class_name: `_class_name` of its configuration.
        config: The configuration, by which a [`LEGACY_CLASS`] is told.

    Raises:
        ValueError: If it is a legacy checkpoint of a model that is not supported; the message lists those that are.
    """
    if class_name != LEGACY_CLASS:
        return class_name
    norm_type = config.get("norm_type")
    if norm_type not in _LEGACY:
        supported = ", ".join(f"{name!r} ({upstream})" for name, upstream in _LEGACY.items())
        raise ValueError(f"A {LEGACY_CLASS} with norm_type={norm_type!r} has no MHLA version. Supported: {supported}.")
    return _LEGACY[norm_type]


def is_mhla_class(class_name: str) -> bool:
    """Return whether a class name (as in `_class_name` of a config) is one of the MHLA classes."""
    return class_name in MHLA_CLASSES


def family_for(class_name: str) -> ModelFamily:
    """Return the family of an upstream or MHLA class name.

    Raises:
        ValueError: If the model is not supported; the message lists those that are.
    """
    family = FAMILIES.get(class_name) or MHLA_CLASSES.get(class_name)
    if family is None:
        raise ValueError(
            f"{class_name} has no MHLA version. Supported: {', '.join(sorted(FAMILIES))}, and models of transformers."
        )
    return family


def trained_family(class_name: str, what: str = "model") -> ModelFamily:
    """Return the family that a transformer class, upstream or MHLA, is trained as.

    Args:
        class_name: As in `_class_name` of a config.
        what: Name of the model in the error.

    Raises:
        ValueError: If such models cannot be trained here.
    """
    known = FAMILIES.get(class_name) or MHLA_CLASSES.get(class_name)
    if known is None or known.training not in TRAINED:
        classes = [each for each in FAMILIES.values() if each.training in TRAINED]
        supported = ", ".join(f"{each.upstream}, {each.mhla_class}" for each in classes)
        raise ValueError(f"{what} is a {class_name}, which cannot be trained here yet; supported: {supported}")
    return TRAINED[known.training]


def mhla_class_for(class_name: str) -> Any:
    """Return the MHLA class for an upstream or MHLA class name; errors as in [`family_for`]."""
    return family_for(class_name).load_class()


def recovery_advice(class_name: str, *, is_same: bool = False, has_towers: bool = False) -> str:
    """Return what to do with a model whose MHLA parameters are new: the same words after every kind of conversion.

    Args:
        class_name: The model's class, of diffusers or transformers.
        is_same: Whether the new parameters leave its output as it was.
        has_towers: Whether it is a model of transformers with MHLA in towers, each with options of its own.
    """
    family = FAMILIES.get(class_name) or MHLA_CLASSES.get(class_name)
    if is_same:
        return "They leave the model's output as it was until they are fine-tuned."
    if has_towers or (family is not None and not family.recipe):
        return (
            "Recover the model before you use it: by mhla_hf.calibrate and mhla_hf.recovery.match_layers in Python, "
            "since mhla_hf.recover does not take it yet."
        )
    return "Recover the model before you use it: mhla-hf recover MODEL OUTPUT, or mhla_hf.recover in Python."


def check_attention(attn_implementation: Any, mhla: Any = None) -> None:
    """Check what was asked of a model or pipeline of diffusers.

    Raises:
        ValueError: If there is no such implementation, or options are given without MHLA.
    """
    if attn_implementation is not None:
        check_choice("attn_implementation", attn_implementation, ("mhla", "softmax"), ", None")
    if mhla is not None and attn_implementation != "mhla":
        raise ValueError(f"mhla options have no effect with attn_implementation={attn_implementation!r}.")


def attention_request(class_name: str, options: dict[str, Any]) -> str | None:
    """Take `attn_implementation` from the options of a call that loads a model of diffusers.

    Args:
        class_name: The model's class.
        options: Keyword arguments of the call. `mhla` stays where it is given, and stands for the request alone too.

    Returns:
        `"mhla"`, `"softmax"` or `None`. Of classes without an MHLA version, `None`: their options are left alone.

    Raises:
        ValueError: If the class has no MHLA version and is asked for it, is an MHLA class and asked for softmax, or
            see [`check_attention`].
    """
    if class_name not in FAMILIES and class_name not in MHLA_CLASSES:
        if options.get("attn_implementation") == "mhla":
            family_for(class_name)
        return None
    asked = options.pop("attn_implementation", None if options.get("mhla") is None else "mhla")
    if asked == "softmax" and class_name in MHLA_CLASSES:
        raise ValueError(f"{class_name} is MHLA: load a softmax checkpoint by {MHLA_CLASSES[class_name].upstream}.")
    # MHLA classes complete their options before they build a model.
    check_attention(asked, None if class_name in MHLA_CLASSES else options.get("mhla"))
    return asked


def refused_families() -> dict[str, TransformersFamily]:
    """Return the transformers architectures without an MHLA version; their notes give the reasons."""
    families = _read_transformers("refused")
    return {name: family for name, family in families.items() if name not in TRANSFORMERS_FAMILIES}
