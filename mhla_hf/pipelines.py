# SPDX-License-Identifier: Apache-2.0
"""Loading diffusers pipelines with MHLA, and converting loaded models and pipelines in place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from .config import MHLAConfig, merge_options
from .models.registry import FAMILIES, MHLA_CLASSES, is_mhla_class, mhla_class_for
from .utils.compat import check_version
from .utils.compat.diffusers import component_quantization
from .utils.locations import PIPELINE_INDEX
from .utils.messages import shorten_value


_OPTIONS = frozenset(field.name for field in dataclasses.fields(MHLAConfig))
_NO_VERSION = f"has an MHLA version. Supported: {', '.join(sorted(FAMILIES))}."
# Arguments of `DiffusionPipeline.download` that locate the files of a Hub repository.
_DOWNLOAD_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
# Arguments that `DiffusionPipeline.from_pretrained` hands to each component.
_COMPONENT_OPTIONS = (
    "device_map",
    "disable_mmap",
    "low_cpu_mem_usage",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "use_flashpack",
    "use_safetensors",
)


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
    if attn_implementation not in ("mhla", "softmax", None):
        given = shorten_value(attn_implementation)
        raise ValueError(f"attn_implementation={given} is not one of 'mhla', 'softmax', None.")
    if mhla is not None and attn_implementation != "mhla":
        raise ValueError(f"mhla options have no effect with attn_implementation={attn_implementation!r}.")
    check_version("diffusers")
    import diffusers

    from .models.directory import ModelDirectory, find_pipeline, read_pipeline
    from .models.weight_files import check_weights

    kwargs.setdefault("use_safetensors", True)
    options = {name: kwargs.pop(name) for name in _DOWNLOAD_OPTIONS if name in kwargs}
    options.update({name: kwargs[name] for name in ("use_safetensors", "variant") if name in kwargs})
    root = find_pipeline(repo_or_dir, **options)
    if not (root / PIPELINE_INDEX).is_file() and (root / "config.json").is_file():
        raise ValueError(
            f"{repo_or_dir} is a model without a pipeline: load it with from_pretrained of its class, of transformers "
            "with attn_implementation='mhla'."
        )
    index, configs = read_pipeline(root, kwargs)
    # Pipelines with code of their own name a file and a class.
    class_name = index["_class_name"] if isinstance(index["_class_name"], str) else index["_class_name"][-1]
    pipeline_class = getattr(diffusers, class_name, None)
    if pipeline_class is None:
        raise ValueError(f"{repo_or_dir} is a {class_name}, which diffusers {diffusers.__version__} does not have.")
    models = {name: ModelDirectory(str(repo_or_dir), root, index, configs, name) for name in configs}
    if attn_implementation == "mhla" and not models:
        raise ValueError(f"No component of {class_name} in {repo_or_dir} {_NO_VERSION}")
    chosen = _chosen_options(models, mhla) if attn_implementation == "mhla" else {}
    for name, model in models.items():
        if name in kwargs and (name in chosen or attn_implementation == "softmax"):
            _check_given_component(name, kwargs[name], attn_implementation, chosen.pop(name, None))
        elif attn_implementation == "softmax" and model.is_mhla:
            raise ValueError(
                f"The {name} of {repo_or_dir} is an MHLA checkpoint; attn_implementation='softmax' would drop its "
                "trained weights. Load the softmax original that it was converted from, or use None."
            )
    classes = {name: mhla_class_for(models[name].class_name) for name in chosen}
    for name, own in chosen.items():
        # Wrong options fail before weights are loaded.
        chosen[name] = classes[name].options_for(configs[name], own, models[name].vae_compression)
    for name, entry in index.items():
        if isinstance(entry, list) and name not in kwargs:
            check_weights(root / name)
    parts = {
        name: classes[name].from_pretrained(root / name, mhla=own, **_component_options(root / name, kwargs))
        for name, own in chosen.items()
    }
    # The class that the index names: others drop the optional components of a pipeline that they are given.
    pipeline = pipeline_class.from_pretrained(root, **parts, **kwargs)
    _place_components(pipeline, parts)
    left = [name for name in chosen if not is_mhla_class(type(getattr(pipeline, name)).__name__)]
    if left:
        raise RuntimeError(f"This version of diffusers loads components in another way: {', '.join(left)} is softmax.")
    return pipeline


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
        raise ValueError(f"No component of this {type(model_or_pipeline).__name__} {_NO_VERSION}")
    factors = [getattr(model_or_pipeline, f"vae_scale_factor_{axis}", None) for axis in ("temporal", "spatial")]
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
    from .layers.original import check_adapters, original_values, take_original, values_of_original

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


def options_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> dict[str, Any]:
    """Return the options of each component that becomes MHLA.

    Args:
        mhla: Options for all components alike, or a dict of options by name of a component. In the latter, components
            that are not named, or named with `None`, stay as they are.
        components: Names of the components that have an MHLA version.

    Returns:
        The options of each component that becomes MHLA.

    Raises:
        ValueError: If a name is none of the components, or no component is left to become MHLA.
    """
    if not is_by_component(mhla, components):
        return dict.fromkeys(components, mhla)
    assert isinstance(mhla, Mapping)
    allowed = ", ".join(components)
    for name in mhla:
        if name not in components:
            what = "an option; give it to each component" if name in _OPTIONS else "not a component that can be MHLA"
            raise ValueError(f"mhla names {shorten_value(name)}, which is {what}: {allowed}.")
    chosen = {name: mhla[name] for name in components if mhla.get(name) is not None}
    if not chosen:
        raise ValueError(f"mhla leaves every component as it is; give options for one of {allowed}.")
    return chosen


def is_by_component(mhla: MHLAConfig | Mapping[str, Any] | None, components: Collection[str]) -> bool:
    """Return whether options are by component: one key names a component, or is unknown and holds options.

    Args:
        mhla: Options of either kind.
        components: See [`options_by_component`].
    """
    if not isinstance(mhla, Mapping):
        return False
    return any(
        name in components or (name not in _OPTIONS and isinstance(options, (Mapping, MHLAConfig)))
        for name, options in mhla.items()
    )


def with_given(mhla: MHLAConfig | Mapping[str, Any] | None, given: Mapping[str, Any]) -> Any:
    """Return options with those that were given as keywords, which win; what is no options is returned as it is."""
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


def _check_given_component(name: str, component: Any, attn_implementation: str | None, mhla: Any) -> None:
    """Refuse a component passed in that contradicts the other arguments."""
    if component is None or attn_implementation is None:
        return
    if mhla is not None or is_mhla_class(type(component).__name__) != (attn_implementation == "mhla"):
        raise ValueError(
            f"attn_implementation={attn_implementation!r} and mhla options have no effect on {name}, which is passed "
            f"in as a {type(component).__name__}; convert it before."
        )


def _chosen_options(models: Mapping[str, Any], mhla: Any) -> dict[str, Any]:
    """Return the components to load as MHLA, with their options."""
    converted = [name for name, model in models.items() if model.is_mhla]
    if converted and not is_by_component(mhla, models):
        # Where one expert was converted and the other was not, that choice stays until the other is named.
        return dict.fromkeys(converted, mhla)
    return options_by_component(mhla, models)


def _component_options(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for a component's `from_pretrained`, as diffusers derives them from the pipeline's."""
    own = {name: options[name] for name in _COMPONENT_OPTIONS if name in options}
    if own.get("device_map") == "balanced":
        # Placed when the sizes of all components are known.
        del own["device_map"]
    dtype = options.get("torch_dtype", options.get("dtype"))
    if isinstance(dtype, Mapping):
        dtype = dtype.get(folder.name, dtype.get("default"))
    if dtype is not None:
        own["torch_dtype"] = dtype
    # Components without files of a variant are loaded from their ordinary ones.
    if options.get("variant") is not None and any(folder.glob(f"*.{options['variant']}[.-]*")):
        own["variant"] = options["variant"]
    quantization = component_quantization(options.get("quantization_config"), folder.name)
    return own if quantization is None else {**own, "quantization_config": quantization}


def _place_components(pipeline: Any, parts: Mapping[str, Any]) -> None:
    """Move components to the devices that `device_map="balanced"` has found for them, as diffusers does."""
    devices = getattr(pipeline, "hf_device_map", None)
    for name, part in parts.items():
        if isinstance(devices, dict) and name in devices:
            from accelerate import dispatch_model

            offloaded = {"state_dict": part.state_dict(), "main_device": 0} if devices[name] == "cpu" else {}
            dispatch_model(part, {"": devices[name]}, force_hooks=True, **offloaded)
