# SPDX-License-Identifier: Apache-2.0
"""Loading diffusers pipelines with MHLA, and converting loaded models and pipelines in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from .config import MHLAConfig, merge_options
from .integrations.diffusers import NO_VERSION, options_by_component
from .models.registry import FAMILIES, MHLA_CLASSES, check_attention
from .utils.compat import check_version
from .utils.compat.diffusers import vae_factor
from .utils.messages import shorten_value


def load_pipeline(
    repo_or_dir: str | os.PathLike[str],
    attn_implementation: str | None = "mhla",
    mhla: MHLAConfig | Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a diffusers pipeline with MHLA in its denoiser.

    Args:
        repo_or_dir: A pipeline directory or a Hub id, of an ordinary checkpoint or an MHLA one.
        attn_implementation: `"mhla"` loads supported components as their MHLA classes (parameters that the
            checkpoint does not have are initialised, with one warning). `None` loads the pipeline as it was saved.
            `"softmax"` also does, and refuses MHLA checkpoints.
        mhla: Options. A dict is laid over the model's own defaults, or over the stored options of an MHLA checkpoint;
            an `MHLAConfig` is taken as it is. Of a pipeline with several denoisers (Wan 2.2) also a dict of options
            by component, `{"transformer": {...}, "transformer_2": {...}}`; a component that is not named, or named
            with `None`, is loaded as it was saved. If a checkpoint has one MHLA denoiser, the other one stays softmax
            unless it is named.
        **kwargs: As for `DiffusionPipeline.from_pretrained`: `torch_dtype`, `variant`, `revision`, `token`,
            `device_map`, `quantization_config`, components by name, ... Files are loaded from safetensors unless
            `use_safetensors` says otherwise: `None` also reads .bin files, with `torch.load(weights_only=True)`.

    Returns:
        The pipeline that the checkpoint's `model_index.json` names, for example a `WanPipeline`.

    Raises:
        ValueError: If `attn_implementation` is unknown, no component of the pipeline can be MHLA, softmax is asked
            of an MHLA checkpoint, or `mhla` is given without `attn_implementation="mhla"` or for a component that
            the pipeline does not have.
        OSError: If there is no such directory or repository, or its weights are not in safetensors files.

    Examples:
        >>> from mhla_hf import load_pipeline
        >>> from mhla_hf.demo import base_pipeline_directory
        >>> pipe = load_pipeline(base_pipeline_directory(), mhla={"blocks": [5, 4, 4]})  # a directory or a Hub id
        >>> type(pipe.transformer).__name__
        'MHLAWanTransformer3DModel'
    """
    check_attention(attn_implementation, mhla)
    check_version("diffusers")
    from diffusers import DiffusionPipeline

    kwargs.setdefault("use_safetensors", True)
    return DiffusionPipeline.from_pretrained(repo_or_dir, attn_implementation=attn_implementation, mhla=mhla, **kwargs)


def convert(model_or_pipeline: Any, mhla: MHLAConfig | Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Convert a loaded softmax model, or every supported component of a diffusers pipeline, to MHLA in place.

    The model keeps a record of its pretrained weights: checksums, and the values that calibration and matching replace
    (in memory on the CPU, for Wan 14B about 8 GB). [`unconvert`][mhla_hf.unconvert] restores them.

    Args:
        model_or_pipeline: A model of transformers, a supported diffusers model, or a diffusers pipeline that has one.
        mhla: The options. Those not given are the model's defaults. For a pipeline also a dict of options by
            component, `{"transformer": {...}, "transformer_2": {...}}`; a component that is not named, or named with
            `None`, stays as it is.
        **options: Options by name, such as `block_size=16` or `layers="2/3"`, over those in `mhla`.

    Returns:
        The same object. The configuration of a model of transformers is a copy from now on.

    Raises:
        ValueError: If there is nothing to convert, or it is MHLA already, offloaded, hooked or quantised. Nothing is
            changed then.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> from mhla_hf import convert
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = convert(BertModel(config), block_size=16, layers="1/2")
        >>> [name for name, _ in model.named_modules() if name.endswith(".mhla")]
        ['encoder.layer.1.attention.self.mhla']
    """
    is_pipeline = _is_pipeline(model_or_pipeline)
    mhla = with_given(mhla, options)
    if _has_base(model_or_pipeline, "transformers.modeling_utils", "PreTrainedModel"):
        check_version("transformers")
        from .integrations.transformers.attaching import convert_transformers_model

        return convert_transformers_model(model_or_pipeline, mhla)

    from .models.converting import check_convertible, convert_model

    if not is_pipeline:
        return convert_model(model_or_pipeline, mhla)
    # A compiled model is found too, and refused with what to do.
    found = {
        name: component
        for name, component in model_or_pipeline.components.items()
        if type(getattr(component, "_orig_mod", component)).__name__ in {**FAMILIES, **MHLA_CLASSES}
    }
    if not found:
        raise ValueError(f"No component of this {type(model_or_pipeline).__name__} {NO_VERSION}")
    factors = [vae_factor(model_or_pipeline, axis) for axis in ("temporal", "spatial")]
    compression: Any = None if None in factors else tuple(factors)
    chosen = {
        name: check_convertible(found[name], own, name, compression)
        for name, own in options_by_component(mhla, found).items()
    }
    for name, own in chosen.items():
        # Registered again, so that a saved index names the MHLA class.
        model_or_pipeline.register_modules(**{name: convert_model(found[name], own)})
    return model_or_pipeline


def unconvert(model_or_pipeline: Any, original: Any = None) -> Any:
    """Restore the softmax original of a converted model, or of every MHLA model of a pipeline, in place.

    Args:
        model_or_pipeline: A model of transformers or diffusers with MHLA layers, or a diffusers pipeline with one.
        original: The softmax original, loaded: a model, or a pipeline for a pipeline. It gives the pretrained weights
            of a model that was trained, or calibrated or matched before it was loaded. By default the model's own
            record gives them.

    Returns:
        The same object.

    Raises:
        ValueError: If there is no MHLA layer, the pretrained weights are not known, or `original` is another model.
            Nothing is changed then.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> from mhla_hf import convert, unconvert
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = unconvert(convert(BertModel(config), block_size=16))
        >>> model.config._attn_implementation
        'sdpa'
    """
    from .layers.mhla import MHLA
    from .layers.weight_record import check_adapters, original_values, take_original, values_of_original

    models: dict[str, tuple[Any, Any]] = {"": (model_or_pipeline, original)}
    if _is_pipeline(model_or_pipeline):
        parts = {name: part for name, part in model_or_pipeline.components.items() if hasattr(part, "mhla_modules")}
        models = {name: (part, getattr(original, name, None)) for name, part in parts.items()}
    if not models or not any(isinstance(module, MHLA) for part, _ in models.values() for module in part.modules()):
        raise ValueError(f"This {type(model_or_pipeline).__name__} has no MHLA layers.")
    check: Callable[[Any], None]
    if _has_base(model_or_pipeline, "transformers.modeling_utils", "PreTrainedModel"):
        from .integrations.transformers.attaching import unconvert_transformers_model as restore

        check = check_adapters
    else:
        from .models.converting import check_unconvertible, unconvert_model

        check, restore = check_unconvertible, unconvert_model
    values = {}
    # Everything is checked before anything changes.
    for name, (model, own) in models.items():
        check(model)
        if original is None:
            original_values(model, "restore softmax attention")
        elif own is None:
            raise ValueError(f"original has no {name}: it must be the pipeline that this one was converted from.")
        else:
            values[name] = values_of_original(model, own)
    for name, (model, _) in models.items():
        if original is not None:
            take_original(model, values[name])
        restore(model)
        if name:
            # Registered again, so that a saved index names the softmax class.
            model_or_pipeline.register_modules(**{name: model})
    return model_or_pipeline


def with_given(mhla: MHLAConfig | Mapping[str, Any] | None, given: Mapping[str, Any]) -> Any:
    """Merge keyword options over `mhla`; return values that are not options unchanged."""
    if not given or not isinstance(mhla, (MHLAConfig, Mapping, type(None))):
        return mhla
    return merge_options(mhla.given_options() if isinstance(mhla, MHLAConfig) else mhla or {}, given)


def _is_pipeline(model_or_pipeline: Any) -> bool:
    """Return whether an object is a pipeline of diffusers rather than a model.

    Raises:
        ValueError: If it is neither.
    """
    is_pipeline = _has_base(model_or_pipeline, "diffusers.pipelines.pipeline_utils", "DiffusionPipeline")
    if not is_pipeline and not _has_base(model_or_pipeline, "torch.nn.modules.module", "Module"):
        raise ValueError(
            f"model_or_pipeline must be a loaded model or pipeline, got {shorten_value(model_or_pipeline)}; load it "
            "with from_pretrained first. Directories on disk are for mhla_hf.convert_pretrained (mhla-hf convert)."
        )
    return is_pipeline


def _has_base(value: Any, module: str, name: str) -> bool:
    """Return whether an object has a class among its bases, without importing the library."""
    return any(base.__module__ == module and base.__name__ == name for base in type(value).__mro__)
