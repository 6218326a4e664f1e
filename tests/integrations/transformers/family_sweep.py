# SPDX-License-Identifier: Apache-2.0
"""What becomes of every language model, encoder, vision and multi-modal model of transformers that is asked for MHLA.

Each is built tiny from its configuration class, asked for MHLA and compared with itself: a cache with recomputing,
a text with a changed end, with padding on the left, with two texts packed into a row. What fails with softmax as well
is the model's own doing and becomes a note. A model that loads has to call each of its MHLA layers; one that is
refused since it does not go through the attention interface must not call a function that is registered there.
`python -m tests.integrations.transformers.family_sweep` writes what it finds into the list that `mhla-hf models`
shows.
"""

from __future__ import annotations

import copy
import inspect
import json
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mhla_hf.integrations.transformers import modules
from mhla_hf.integrations.transformers.attaching import _attentions
from mhla_hf.integrations.transformers.towers import towers_of
from mhla_hf.models.registry import TRANSFORMERS_DATA

from .mhla_models import mhla_modules, unsettle
from .shrinking import MAX_PARAMETERS, num_parameters, tiny_config
from .tiny_models import sharpen


# What a note begins with where older versions of transformers do not serve the model.
SINCE = re.compile(r"(from transformers [\d.]+ on)(; )?")
MAPPINGS = {
    "language model": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "multi-modal": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "vision": "MODEL_MAPPING_NAMES",
}
OPTIONS = {"block_size": 4, "grid": [24], "mixing_heads": "per_head"}
# Rotary embeddings over time, height and width.
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_THREE_AXES = {"text_config": {"rope_parameters": _ROPE}}
# Fields whose names and defaults do not tell how to make a small model with an attention layer.
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"), _THREE_AXES
    ),
    # Small tokenizers, and tokens of images and sound inside a small vocabulary.
    "apertus1p5": {
        "audio_config": {"codebook_dim": 32, "codebook_size": 8, "num_filters": 4},
        "audio_token_id": 61,
        "audio_token_offset": 78,
        "image_token_id": 60,
        "image_token_offset": 70,
        "vision_config": {"base_channels": 32, "codebook_size": 8},
    },
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "clip_text_model": {"eos_token_id": 2},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    "exaone_moe": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    # As in the published models whose layers have keys and values of their own.
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}},
    "gpt_neo": {"attention_types": [[["global"], 2]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron": {"num_key_value_heads": 2},
    "swinv2": {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]},
    "xmod": {"default_language": "en_XX"},
}


@dataclass(frozen=True)
class Outcome:
    """What became of one model.

    Attributes:
        status: "works", "refused", "not checked" or "wrong".
        text: A note, the reason, or what is wrong.
        rope: Where its rotary embeddings are by default.
        part: The `model_type` of the text part of a model of several towers.
    """

    status: str
    text: str = ""
    rope: str = "after_feature_map"
    part: str = ""


def names(kind: str) -> dict[str, str]:
    """Classes by `model_type`; of vision models those that the type alone tells from models of several towers."""
    found = dict(getattr(modeling_auto, MAPPINGS[kind]))
    if kind == "multi-modal":
        found |= modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    if kind == "vision":
        images = set(modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
        found = {name: one for name, one in found.items() if name in images or "vision" in name}
    if kind == "encoder":
        found |= {"clip_text_model": "CLIPTextModel", "siglip_text_model": "SiglipTextModel"}
    return {name: one if isinstance(one, str) else one[0] for name, one in sorted(found.items())}


def sweep(kind: str, name: str) -> Outcome:
    """Builds one model, asks it for MHLA and checks it against itself."""
    try:
        model_class = getattr(transformers, names(kind)[name])
        config = tiny_config(model_class.config_class or CONFIG_MAPPING[name], **SETTINGS.get(name, {}))
        if kind == "vision" and towers_of(config):
            return Outcome("not checked", "of several towers")
        if kind == "language model" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        count = num_parameters(model_class, copy.deepcopy(config))
        if count > MAX_PARAMETERS:
            return Outcome("not checked", f"not built: {count // 10**6}M parameters at the smallest")
        model_class(copy.deepcopy(config))
    except Exception as error:
        return Outcome(
            "not checked", f"not built: {_line(error) if isinstance(error, ImportError) else type(error).__name__}"
        )
    softmax = copy.deepcopy(config)
    softmax._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
    try:
        return _asked(kind, model_class, config, softmax, "after_feature_map")
    except ValueError as error:
        if "does not go through" in str(error) and _reaches_functions(kind, model_class, softmax):
            return Outcome("wrong", "it is refused, and calls registered attention functions")
        if "before_feature_map" not in str(error):
            return Outcome("refused", _line(error))
    try:
        return _asked(kind, model_class, config, softmax, "before_feature_map")
    except ValueError as error:
        return Outcome("refused", _line(error))


def _asked(kind: str, model_class: Any, config: Any, softmax: Any, rope: str) -> Outcome:
    notes = []
    options = {} if kind == "vision" else {**OPTIONS, "rope": rope}
    config = copy.deepcopy(config)
    config.mhla = {"text_config": options} if kind == "multi-modal" and "text_config" in towers_of(config) else options
    try:
        model = _build(model_class, config)
    except ValueError as error:
        settings = _settings(model_class, softmax) if "sliding_window=None" in str(error) else {}
        if not settings:
            raise
        config = copy.deepcopy(softmax)
        config._attn_implementation = None
        for one in (config, softmax):
            for name, value in settings.items():
                setattr(one.get_text_config(), name, value)
        config.get_text_config().mhla = options
        shown = {name: "[full_attention, …]" if isinstance(value, list) else value for name, value in settings.items()}
        notes.append(f"with {', '.join(f'{name}={value}' for name, value in shown.items())}")
        model = _build(model_class, config)
    if not mhla_modules(model):
        return Outcome("refused", "it has no attention that can be MHLA")
    if any(part.config._attn_implementation != "mhla" for part in _parts(model) if _attends(part)):
        return Outcome("wrong", "it has MHLA layers and attends with softmax")
    unsettle(model)
    called: set[int] = set()
    for module in mhla_modules(model):
        module.register_forward_hook(lambda module, *_: called.add(id(module)))
    attending = [module for part in _parts(model) for _, module in _attentions(part)]
    if any(not hasattr(module, "mhla") for module in attending):
        notes.append("sliding-window layers stay softmax")
    own = None
    for check in CHECKS[kind]:
        found = _passes(check, model)
        if check is CHECKS[kind][0] and not isinstance(found, Exception) and len(called) < len(mhla_modules(model)):
            return Outcome("wrong", "its attention never reaches MHLA")
        if found is True:
            continue
        own = own or _build(model_class, copy.deepcopy(softmax))
        if _passes(check, own) is True:
            if isinstance(found, ValueError) and check is packing:
                notes.append("packed texts are refused")
                continue
            if isinstance(found, ValueError):
                raise found
            return Outcome("wrong", f"{check.__name__}: {_line(found) if found else 'differs'}")
        if check is CHECKS[kind][0]:
            return Outcome("not checked", "takes other inputs")
        notes.append(_OWN[check.__name__])
    text = config.get_text_config().model_type if kind == "multi-modal" else ""
    return Outcome("works", "; ".join(dict.fromkeys(notes)), rope, text)


def _build(model_class: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(config).eval()
    sharpen(model)
    return model


_CALLERS: list[Any] = []


def _note_call(module: Any, *args: Any, **kwargs: Any) -> Any:
    _CALLERS.append(module.config)
    return AttentionInterface()["sdpa"](module, *args, **kwargs)


AttentionInterface.register("noted", _note_call)
AttentionMaskInterface.register("noted", AttentionMaskInterface()["sdpa"])


def _reaches_functions(kind: str, model_class: Any, config: Any) -> bool:
    """Whether the text, or all, of a softmax model calls an attention function registered by name."""
    model = _build(model_class, copy.deepcopy(config))
    text = model.config.get_text_config()
    text._attn_implementation_internal = "noted"
    _CALLERS.clear()
    _passes(CHECKS[kind][0], model)
    return any(caller is text for caller in _CALLERS)


def _parts(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]


def _attends(part: Any) -> bool:
    own = [module for module in part.modules() if getattr(module, "config", None) is part.config]
    return any(hasattr(module, "mhla") for module in own)


def _settings(model_class: Any, config: Any) -> dict[str, Any]:
    """What one should set so that layers within sliding windows attend to the whole text."""
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    return next((found for module in model.modules() if hasattr(module, "config") and not hasattr(module, "base_model")
                 and (found := _without_windows(module))), {})  # fmt: skip


def _without_windows(module: Any) -> dict[str, Any]:
    """Settings of one attention module; empty where it has no window, or where more than that would change."""
    config: Any = copy.deepcopy(module.config)
    types = getattr(config, "layer_types", None)
    settings: dict[str, Any] = {"sliding_window": None} if getattr(config, "sliding_window", None) else {}
    if isinstance(types, (list, tuple)):
        condition = " and ".join(modules._rotation_conditions(module))
        # Where no layer may have a window, the model must not make a mask for such layers either.
        made_when_used = '"sliding_attention" in self.config.layer_types'
        rotates_anyway = "sliding_window is None" in condition and made_when_used in modules.source_of(
            modules._file_of(module)
        )
        if "sliding_attention" not in types or ("sliding" in condition and not rotates_anyway):
            return {}
        full = ["full_attention" if kind == "sliding_attention" else kind for kind in types]
        settings = {**({"sliding_window": None} if "sliding" in condition else {}), "layer_types": full}
    try:
        for name, value in settings.items():
            setattr(config, name, value)
    except Exception:
        # Some configurations do not allow a model without windows.
        return {}
    return settings


def _passes(check: Callable[[Any], bool], model: Any) -> bool | Exception:
    try:
        with torch.no_grad():
            return check(model)
    except Exception as error:
        return error


def _tokens() -> torch.Tensor:
    return torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))


def _logits(model: Any, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    parameters = inspect.signature(type(model).forward).parameters
    given = {name: value for name, value in given.items() if name != "position_ids" or name in parameters}
    without = {"use_cache": False} if model.can_generate() else {}
    return model(input_ids=ids, **without, **given)[0]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def attends(model: Any) -> bool:
    ids = _tokens()
    output = _logits(model, ids)
    return bool(output.isfinite().all()) and _same(output[:1], _logits(model, ids[:1]))


def decoding(model: Any) -> bool:
    ids = _tokens()
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 7, "eos_token_id": None}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    steps = [torch.stack(model.generate(ids, use_cache=cache, **given).logits) for cache in (True, False)]
    return _same(*steps)


def causality(model: Any) -> bool:
    ids = _tokens()
    changed = ids.clone()
    changed[:, 9:] = 61
    one, other = _logits(model, ids), _logits(model, changed)
    return _same(one[:, :9], other[:, :9]) and not _same(one, other)


def left_padding(model: Any) -> bool:
    ids = _tokens()
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) + _first_position(model)
    padded = _logits(model, ids * mask, attention_mask=mask, position_ids=positions)
    return _same(padded[:, 4:], _logits(model, ids[:, 4:]))


def packing(model: Any) -> bool:
    ids = _tokens()
    positions = torch.cat([torch.arange(6), torch.arange(7)])[None].expand(2, -1) + _first_position(model)
    packed = _logits(model, ids, position_ids=positions)
    return _same(packed[:, :6], _logits(model, ids[:, :6])) and _same(packed[:, 6:], _logits(model, ids[:, 6:]))


def _first_position(model: Any) -> int:
    """Models in the manner of RoBERTa count from behind the padding token."""
    embeddings = getattr(model.base_model, "embeddings", None)
    return 0 if getattr(embeddings, "padding_idx", None) is None or "ert" not in type(model).__name__ else (
        embeddings.padding_idx + 1 if hasattr(embeddings, "create_position_ids_from_input_ids") else 0
    )  # fmt: skip


def images(model: Any) -> bool:
    size = model.config.image_size if isinstance(model.config.image_size, int) else model.config.image_size[0]
    channels = getattr(model.config, "num_channels", 3)
    given = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(0))
    both, one = model(given)[0], model(given[:1])[0]
    return bool(both.isfinite().all()) and _same(both[:1], one)


CHECKS: dict[str, tuple[Callable[[Any], bool], ...]] = {
    "language model": (attends, decoding, causality, left_padding, packing),
    "encoder": (attends, left_padding, packing),
    "multi-modal": (attends, decoding, causality, left_padding),
    "vision": (images,),
}
_OWN = {
    "decoding": "its cache does not generate the same, with softmax as well",
    "causality": "looks ahead, with softmax as well",
    "left_padding": "needs padding on the right, with softmax as well",
    "packing": "packed texts see each other, with softmax as well",
}


def _line(error: Any) -> str:
    text = " ".join(str(error).split())
    start = text.find("cannot use attn_implementation='mhla': ")
    text = text[start + len("cannot use attn_implementation='mhla': ") :] if start >= 0 else text
    for advice in (" Other parts can", " mhla_hf.supported_models()", " Where the model can do without"):
        text = text.split(advice)[0]
    return text[:200].rstrip(".")


def entries(kind: str, name: str) -> list[dict[str, str]]:
    """What the list says of a model: one entry, and one for a text part that no language model has.

    Raises:
        AssertionError: If the model is wrong.
    """
    outcome = sweep(kind, name)
    assert outcome.status != "wrong", f"{kind} {name}: {outcome.text}"
    found = [{"name": name, "kind": kind, "status": outcome.status, "note": outcome.text, "rope": outcome.rope}]
    if outcome.part and outcome.part not in names("language model"):
        found.append({**found[0], "name": outcome.part, "kind": "language model", "note": f"text part of {name}"})
    return found


def since(entry: dict[str, str], stored: list[dict[str, str]], version: str) -> str:
    """What the note of a model begins with that works in this version of transformers, and did not in former ones."""
    key = operator.itemgetter("kind", "name", "status")
    former = next((one["note"] for one in stored if key(one) == key(entry)), None)
    if former is None:
        return f"from transformers {version} on" if entry["status"] == "works" else ""
    found = SINCE.match(former)
    return found[1] if found else ""


def main() -> None:
    """Writes the list, beside the one of a former version."""
    transformers.logging.set_verbosity_error()
    stored = json.loads(TRANSFORMERS_DATA.read_text(encoding="utf-8"))["models"]
    version = transformers.__version__.rpartition(".")[0]
    found = [entry for kind in MAPPINGS for name in names(kind) for entry in entries(kind, name)]
    for entry in found:
        entry["note"] = "; ".join(filter(None, (since(entry, stored, version), entry["note"])))
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in found)
    head = f'"transformers": "{transformers.__version__}"'
    TRANSFORMERS_DATA.write_text(f'{{{head}, "models": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
