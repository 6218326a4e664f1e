# SPDX-License-Identifier: Apache-2.0
"""Base of the MHLA versions of diffusers models: options, construction, loading, adapters, parallelism."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch.nn as nn
from diffusers.models.modeling_utils import ModelMixin

from ..config import MHLAConfig, merge_options
from ..layers.mhla import MHLA
from ..layers.mixing import layout_at, reference_blocks, resolve_blocks
from ..layers.weight_record import STATE_KEY, record_weights, weights_state
from ..ops.sharded import TokenShard
from ..utils.compat import diffusers as compat
from ..utils.compat import note_unchecked
from ..utils.locations import LOCATION_OPTIONS, find_file
from ..utils.messages import shorten_list
from ..utils.tensor_files import check_floats, read_entries
from . import limits, loading, sizes, weight_files
from .registry import attention_request, family_for
from .single_file import own_weights, softmax_names


# To the type checker, a mixin has every attribute of the diffusers class beside it.
Upstream: Any = object

# Lists of a diffusers class by which loaders and hooks find its sensitive parts, with those of MHLA layers.
_DECLARED = {
    "_keep_in_fp32_modules": ("mixing", "normalizer_scale", "output_norm", "text_bias", "window_bias", "window_query"),
    "_skip_layerwise_casting_patterns": ("mhla",),
}


class MHLAAdapterMixin(Upstream):
    """The adapter methods of a diffusers model, for adapters that carry MHLA parameters besides."""

    def enable_lora(self) -> None:
        """As upstream; MHLA parameters that an adapter carries go with it, here and in the methods below."""
        super().enable_lora()
        self._enable_saved_modules(True)

    def disable_lora(self) -> None:
        """As upstream, back to the model's own MHLA parameters."""
        super().disable_lora()
        self._enable_saved_modules(False)

    def enable_adapters(self) -> None:
        """As `enable_lora`."""
        super().enable_adapters()
        self._enable_saved_modules(True)

    def disable_adapters(self) -> None:
        """As `disable_lora`."""
        super().disable_adapters()
        self._enable_saved_modules(False)

    def set_adapters(self, adapter_names: list[str] | str, weights: Any = None) -> None:
        """As upstream. MHLA parameters that an adapter carries are used whole, or not at all where its weight is 0.

        Raises:
            ValueError: If several of the adapters carry MHLA parameters.
        """
        self._choose_saved_modules(adapter_names, weights)
        super().set_adapters(adapter_names, weights)

    def set_adapter(self, adapter_name: list[str] | str) -> None:
        """As `set_adapters`, without weights."""
        self._choose_saved_modules(adapter_name)
        super().set_adapter(adapter_name)

    def unload_lora(self) -> None:
        """As upstream; the model's own MHLA parameters are back in their place."""
        for name, wrapper in self._saved_modules():
            parent, _, child = name.rpartition(".")
            setattr(self.get_submodule(parent), child, wrapper.original_module)
        super().unload_lora()

    def delete_adapters(self, adapter_names: list[str] | str) -> None:
        """As upstream, with the MHLA parameters of the adapters."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        for _, wrapper in self._saved_modules():
            for name in names:
                wrapper.delete_adapter(name, [other for other in wrapper.active_adapters if other not in names])
        super().delete_adapters(adapter_names)

    def _saved_modules(self) -> list[tuple[str, Any]]:
        """The modules that adapters bring copies of, with their names."""
        from peft.utils import ModulesToSaveWrapper

        return [(name, module) for name, module in self.named_modules() if isinstance(module, ModulesToSaveWrapper)]

    def _enable_saved_modules(self, enabled: bool) -> None:
        for _, wrapper in self._saved_modules():
            wrapper.enable_adapters(enabled)

    def _choose_saved_modules(self, adapter_names: list[str] | str, weights: Any = None) -> None:
        """Turns to the modules of the one adapter that carries some; without one, back to the model's own."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        each = weights if isinstance(weights, list) else [weights] * len(names)
        wanted = [name for name, weight in zip(names, each) if weight is None or weight]
        for path, wrapper in self._saved_modules():
            carrying = [name for name in wanted if name in wrapper.modules_to_save]
            if len(carrying) > 1:
                raise ValueError(
                    f"The adapters {', '.join(carrying)} each carry {path} whole, so only one of them can be active."
                )
            wrapper.enable_adapters(bool(carrying))
            if carrying:
                wrapper.set_adapter(carrying)


class MHLAModelMixin(MHLAAdapterMixin):
    """Goes before a diffusers model class in the bases of its MHLA version.

    Subclasses set `default_grid` and `attention_class`; where a model's options have other defaults than `MHLAConfig`,
    they set `default_options`. The constructor is the upstream one plus the keyword `mhla`.
    """

    # The token grid that block counts are derived from when the options give neither blocks nor grid.
    default_grid: ClassVar[tuple[int, ...]]
    # Defaults in place of those of `MHLAConfig`; options given as a dict are laid over them.
    default_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    # Whether upstream's own attention equals MHLA under `default_options` with equal mixing weights.
    upstream_is_linear: ClassVar[bool] = False
    # The module of an MHLA layer.
    layer_class: ClassVar[type[MHLA]] = MHLA
    # What the self-attention of every layer becomes, MHLA or not.
    attention_class: ClassVar[type]
    # What modules of the model become, such as its rotary embedding, by their names.
    module_classes: ClassVar[Mapping[str, type]] = MappingProxyType({})
    # Entries of the configuration that count layers.
    layer_counts: ClassVar[tuple[str, ...]] = ("num_layers",)
    # Whether tokens may come block by block, where all parts of the model allow it: see `ordering`.
    block_order: bool = True
    # Whether MHLA layers can hold a part of the token sequence each.
    supports_context_parallel: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Only classes that name a mixin themselves: FSDP2 subclasses a model's class again.
        mixed_in = any(issubclass(base, MHLAModelMixin) and not issubclass(base, ModelMixin) for base in cls.__bases__)
        if not mixed_in or not issubclass(cls, ModelMixin):
            return
        # The public name. Pickles, and diffusers' index of pipelines, name classes by it.
        cls.__module__ = __name__.partition(".")[0]
        upstream = cls._upstream_class()
        for name, ours in _DECLARED.items():
            setattr(cls, name, compat.declared(upstream, name, *ours))
        if "__init__" in cls.__dict__:
            return

        # diffusers reads the constructor's signature to tell config entries from unknown ones.
        def __init__(self: Any, *args: Any, mhla: Any = None, **init_kwargs: Any) -> None:
            upstream.__init__(self, *args, **init_kwargs)
            self._install_mhla(mhla)

        signature = inspect.signature(upstream.__init__)
        mhla = inspect.Parameter("mhla", inspect.Parameter.KEYWORD_ONLY, default=None)
        __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), mhla]
        )
        __init__.__doc__ = upstream.__init__.__doc__
        cls.__init__ = __init__  # type: ignore[method-assign, assignment]

    @classmethod
    def _upstream_class(cls) -> Any:
        """The class of diffusers that an MHLA class extends."""
        return next(
            base for base in cls.__mro__ if issubclass(base, ModelMixin) and not issubclass(base, MHLAModelMixin)
        )

    def _self_attentions(self) -> list[nn.Module]:
        """The self-attention module of every layer, in order."""
        return [block.attn1 for block in self.transformer_blocks]

    def _use_mhla(self, attentions: list[Any], mhla_layers: list[int]) -> None:
        """Make the attention modules of `mhla_layers` compute with their new submodule `mhla`."""
        for name, cls in self.module_classes.items():
            getattr(self, name).__class__ = cls
        for attention in attentions:
            attention.__class__ = self.attention_class
        for index in mhla_layers:
            attentions[index].set_processor(attentions[index].mhla_processor_class())

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return random arguments of `forward` that models of other families do not take.

        Args:
            model: An MHLA model or the diffusers model.
            grid: Latents along each axis, or tokens of models that take packed latents.
            text: Tokens of the text.
            random: Called with a shape, draws a tensor that has B before it.
        """
        return {}

    @classmethod
    def coerce_options(cls, options: MHLAConfig | Mapping[str, Any] | None) -> MHLAConfig:
        """Return options as an `MHLAConfig`: those that were given, over the model's own defaults.

        Args:
            options: The options. Of an `MHLAConfig`, those that its constructor was called with.

        Raises:
            ValueError: If an option is unknown or has a value that is not allowed.
        """
        if isinstance(options, MHLAConfig):
            options = options.given_options()
        if options is not None and not isinstance(options, Mapping):
            return MHLAConfig.from_dict(options)
        return MHLAConfig.from_dict({**cls.default_options, **(options or {})})

    @classmethod
    def config_value(cls, config: Mapping[str, Any], name: str) -> Any:
        """Return an argument of the model's constructor as a configuration has it, or its default."""
        default = inspect.signature(cls.__init__).parameters[name].default
        return config.get(name, default)

    @classmethod
    def layer_count(cls, config: Mapping[str, Any]) -> int:
        """Return the number of self-attention layers that a model of this configuration has."""
        return sum(cls.config_value(config, name) for name in cls.layer_counts)

    @classmethod
    def patch_sizes(cls, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the number of latents that a token stands for along each axis."""
        return sizes.patch_sizes(cls, config, f"the configuration of this {cls.__name__}")

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Raise `ValueError` for a configuration of the class that MHLA does not support."""

    @classmethod
    def config_grid(cls, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Return the token grid of the samples that a model was made for; `None` where its configuration has none.

        Models of videos may have it as the size of their latents: `sample_frames`, `sample_height`, `sample_width`.
        diffusers warns of entries that a class does not take, unless their names begin with an underscore; so
        `_sample_frames` and the others count too.
        """
        size = limits.sample_size(config)
        if size is None:
            return None
        return tuple(max(1, length // patch) for length, patch in zip(size, cls.patch_sizes(config)))

    @classmethod
    def reference_grid(cls, config: Mapping[str, Any], compression: tuple[int, int] | None = None) -> tuple[int, ...]:
        """Return the token grid that block counts are derived from in a model of this configuration.

        Args:
            config: The configuration.
            compression: Frames and pixels that one latent of the pipeline's VAE stands for, along time and each side;
                those of Wan 2.1 by default.
        """
        grid = cls.config_grid(config)
        # Pipelines of images make the same grid with every VAE.
        if grid is not None or compression is None or len(cls.default_grid) == 2:
            return grid or cls.default_grid
        # The pixels that pipelines make by default, with another VAE or other patches.
        usual = sizes.SampleSize(family_for(cls._upstream_class().__name__).vae, cls.patch_sizes({}))
        grid = sizes.SampleSize(compression, cls.patch_sizes(config)).grid(**usual.pixels(cls.default_grid))
        return tuple(max(1, length) for length in grid)

    @classmethod
    def resolve_options(
        cls,
        options: MHLAConfig | Mapping[str, Any] | None,
        config: Mapping[str, Any],
        compression: tuple[int, int] | None = None,
    ) -> MHLAConfig:
        """Return options as a model keeps them: over its defaults, with the number of blocks pinned.

        The grid is pinned too, so that `resize="auto"` knows from which size on to resample. Given `blocks` alone are
        for the grid that the configuration tells. Where it tells none, and in checkpoints saved without a grid (whose
        options hold it as `None`), the blocks keep their number at any size.

        Args:
            options: The options.
            config: The model's configuration.
            compression: See [`reference_grid`], for a softmax model in a pipeline, whose samples tell the grid where
                nothing else does.

        Raises:
            ValueError: If an option is wrong, there are more blocks than tokens on an axis, or MHLA does not support
                the configuration.
        """
        cls.check_config(config)
        given, grid = cls.coerce_options(options), cls.config_grid(config)
        if compression is not None and (grid, given.grid, given.blocks) == (None, None, None):
            given = given.replace(grid=cls.reference_grid(config, compression))
        resolved = resolve_blocks(given, cls.reference_grid(config))
        if grid is None or resolved.blocks is None or "grid" in resolved.given_options():
            return resolved
        return resolved.replace(grid=grid)

    def single_block_warning(self) -> str | None:
        """Return a warning if samples of the model's own size are one block; `None` if they are several."""
        options = self.mhla_config
        blocks = reference_blocks(options)
        grid = self.config_grid(self.config) or options.grid
        if grid is not None:
            blocks = layout_at(options, blocks, grid).blocks
        if math.prod(blocks) > 1:
            return None
        tokens = "all tokens" if grid is None else f"all {'×'.join(map(str, grid))} tokens"
        return (
            f"{type(self).__name__}: {tokens} of a sample are in one block, which is plain linear attention. Give "
            "more blocks (blocks, --blocks), or the token grid of the samples that you will make (grid, --grid)."
        )

    @classmethod
    def starts_as_upstream(cls, options: MHLAConfig) -> bool:
        """Return whether a converted model computes the same as the diffusers class, until it is trained.

        Args:
            options: Complete options, as a model keeps them.
        """
        stock = cls.coerce_options(None)
        fixed = (*loading.TRAINED_WITH, "eps", "output_norm")
        equal_weights = options.mixing_init == "uniform" or math.prod(reference_blocks(options)) == 1
        same = all(getattr(options, name) == getattr(stock, name) for name in fixed)
        return cls.upstream_is_linear and equal_weights and same

    def _install_mhla(self, options: MHLAConfig | Mapping[str, Any] | None) -> None:
        note_unchecked("diffusers")
        config = self.resolve_options(options, self.config)
        attentions: list[Any] = self._self_attentions()
        layers = config.mhla_layers(len(attentions))
        if isinstance(config.layers, str):
            config = config.replace(layers=layers)
        for index in layers:
            query, heads = attentions[index].to_q, attentions[index].heads
            mhla = self.layer_class(
                config, hidden_size=query.in_features, num_heads=heads, head_dim=query.out_features // heads
            )
            mhla.replaces_linear = self.upstream_is_linear
            attentions[index].mhla = mhla
        self._use_mhla(attentions, layers)
        self.register_to_config(mhla=config.to_dict())
        record_weights(self)

    @property
    def mhla_config(self) -> MHLAConfig:
        """The options that this model was built with."""
        return MHLAConfig.from_dict(self.config.mhla)

    @property
    def mhla_layers(self) -> list[int]:
        """Indices of the layers that are MHLA."""
        return [index for index, attention in enumerate(self._self_attentions()) if hasattr(attention, "mhla")]

    def mhla_modules(self) -> dict[int, MHLA]:
        """The `MHLA` module of each MHLA layer, by layer index."""
        attentions: list[Any] = self._self_attentions()
        return {index: attentions[index].mhla for index in self.mhla_layers}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """As upstream; see the class for the checkpoints that it takes.

        `low_cpu_mem_usage=False` alone has no effect: diffusers cannot load like that what it keeps in fp32, and the
        model is the same either way. Checkpoints that are MHLA already are loaded from pickles (`.bin`) with
        `use_safetensors=False` alone.
        """
        if kwargs.get("low_cpu_mem_usage") is False and not kwargs.get("ignore_mismatched_sizes"):
            del kwargs["low_cpu_mem_usage"]
        given = kwargs.get("use_safetensors")
        kwargs["use_safetensors"] = given is not False
        try:
            return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except OSError as error:
            where = {name: kwargs[name] for name in LOCATION_OPTIONS if name in kwargs}
            is_mhla = cls.load_config(pretrained_model_name_or_path, **where).get("mhla") is not None
            folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            loading.check_missing_weights(folder, error, pickles_allowed=not is_mhla or given is False)
            if is_mhla or given is not None:
                raise
        return super().from_pretrained(pretrained_model_name_or_path, **{**kwargs, "use_safetensors": None})

    @classmethod
    def from_config(cls, config: Any, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As upstream. Options given as `mhla` override single options of the ones in `config`."""
        if isinstance(config, (str, os.PathLike)):
            config = cls.load_config(config)
        stored = None
        if config is not None:
            config = weight_files.from_stored(config)
            stored = config.get("mhla")
            # Constructors are not told of entries that upstream does not take, such as the size of samples.
            kwargs["mhla"] = cls.options_for(config, kwargs.get("mhla"))
        result = super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
        # Loading weights that were made under other options has to check that they mean the same under these.
        (result[0] if return_unused_kwargs else result)._mhla_options_of_checkpoint = stored
        return result

    @classmethod
    def options_for(
        cls,
        config: Mapping[str, Any],
        given: MHLAConfig | Mapping[str, Any] | None,
        compression: tuple[int, int] | None = None,
    ) -> MHLAConfig:
        """Return the complete options of a model: the given ones over those of its configuration.

        Args:
            config: The configuration, of a softmax model or an MHLA one.
            given: The options.
            compression: See [`reference_grid`], for a softmax model in a pipeline.

        Raises:
            ValueError: If the configuration or an option is wrong.
        """
        limits.check_model_config(cls, config, f"the configuration of this {cls.__name__}")
        stored = config.get("mhla")
        if stored is None:
            return cls.resolve_options(given, config, compression)
        # Checked alone: what is given over them need not mend them.
        cls.coerce_options(stored)
        if isinstance(given, MHLAConfig):
            given = given.given_options()
        merged = merge_options(stored, given) if isinstance(given, Mapping) else given
        return cls.resolve_options(stored if merged is None else merged, config)

    # Pipelines read its signature.
    @functools.wraps(ModelMixin.save_pretrained)
    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        from .stub import STUB

        weight_files.check_saved(self)
        # What was done to the model goes into the configuration.
        self.register_to_config(**{STATE_KEY: weights_state(self)})
        super().save_pretrained(save_directory, *args, **kwargs)
        Path(save_directory, f"{weight_files.STUB_MODULE}.py").write_text(STUB, encoding="utf-8")

    def to_json_string(self) -> str:
        """The configuration as `config.json` holds it, with an entry by which softmax classes refuse it."""
        stored = weight_files.to_stored(json.loads(super().to_json_string()))
        return json.dumps(stored, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_single_file(
        cls,
        pretrained_model_link_or_path: str | os.PathLike[str],
        *,
        mhla: MHLAConfig | Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load softmax weights of the model's authors (or of ComfyUI) from one file, and turn them into MHLA.

        Args:
            pretrained_model_link_or_path: A .safetensors file, or its address on the Hub. Wan's GGUF files are for
                [`convert_pretrained`][mhla_hf.convert_pretrained].
            mhla: The options. Those not given are the model's defaults.
            config: A directory or Hub id with the model's configuration; by default upstream looks for one on the Hub.
            **kwargs: As upstream: `subfolder`, `torch_dtype`, `device`, `revision`, `token`, ...

        Raises:
            ValueError: If the class has no such loader in diffusers, the file is missing, damaged, no safetensors, of
                another model or MHLA already, an option is wrong, or the weights are or should be quantised.
        """
        from .converting import convert_model

        attention_request(cls.__name__, kwargs)
        upstream = cls._upstream_class()
        is_wan = upstream.__name__ == "WanTransformer3DModel"
        directory = f"Take a diffusers directory of {upstream.__name__}"
        if not compat.loads_single_files(upstream):
            raise ValueError(f"diffusers loads no single files of this class. {directory}: from_pretrained loads it.")
        path = find_file(pretrained_model_link_or_path, **kwargs)
        if path.suffix != ".safetensors" or kwargs.get("quantization_config") is not None:
            other = "Convert a GGUF file by convert_pretrained" if is_wan else f"{directory} in place of a GGUF file"
            advice = f"{other}; quantise the saved MHLA directory when it is loaded."
            raise ValueError(f"{path}: only .safetensors files are loaded, without quantization_config. {advice}")
        entries = read_entries(path)
        # Without their scales, which diffusers does not look for.
        check_floats(entries, path)
        names = [entry.name for entry in entries]
        weight_files.check_no_adapters(names, path)
        if is_wan:
            try:
                # Refuses what diffusers drops with a warning: the modules of Wan-Animate and Wan-VACE.
                softmax_names(names)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        with weight_files.damage_named(path):
            if config is not None:
                where = {name: kwargs[name] for name in LOCATION_OPTIONS if name in kwargs}
                where["revision"] = kwargs.get("config_revision")
                limits.check_model_config(upstream, upstream.load_config(str(config), **where), str(config))
                kwargs["config"] = str(config)
            model = upstream.from_single_file(str(path), **kwargs)
        if isinstance(model, MHLAModelMixin):
            raise ValueError(f"config describes {type(model).__name__}; give that of the softmax model.")
        # diffusers only warns of layers that the configuration leaves out, and of other weights.
        found = compat.single_file_names(model, own_weights({entry.name: entry.shape for entry in entries}))
        weight_files.check_layer_count(len(cls._self_attentions(model)), found, f"the configuration for {path}")
        ignored = compat.declared(model, "_keys_to_ignore_on_load_unexpected")
        left = sorted(name for name in {*found} - {*model.state_dict()} if not any(part in name for part in ignored))
        if left:
            raise ValueError(f"{path} has weights that {upstream.__name__} has no place for: {shorten_list(left)}.")
        return convert_model(model, mhla, str(path))

    def enable_parallelism(self, *, config: Any, cp_plan: Any = None) -> None:
        """As upstream, for context parallelism of models that have it.

        Args:
            config: `ContextParallelConfig`, or a `ParallelConfig` with one.
            cp_plan: Modules at which the sequence is split and gathered; by default the model's own plan.

        Raises:
            ValueError: For tensor parallelism, and where the model or its options have no context parallelism.
            RuntimeError: If `torch.distributed` is not initialised, or the model is parallel already.
        """
        if not self.supports_context_parallel or _context_config(config) is None:
            supported = "context parallelism alone" if self.supports_context_parallel else "no context parallelism"
            raise ValueError(f"{type(self).__name__} supports {supported}, got {type(config).__name__}.")
        if self.mhla_config.window is not None:
            raise ValueError(
                "Context parallelism does not reach over a softmax window: convert without the option window."
            )
        super().enable_parallelism(config=config, cp_plan=cp_plan)

    @classmethod
    def _load_pretrained_model(cls, *args: Any, **kwargs: Any) -> Any:
        load = super()._load_pretrained_model
        return loading.load_mhla_weights(load, compat.loading_call(load, *args, **kwargs))


def shard_of(processor: Any, num_tokens: int) -> TokenShard | None:
    """Return the part of a sequence that an attention module gets under context parallelism.

    Args:
        processor: The module's processor, which `enable_parallelism` tells of context parallelism.
        num_tokens: Tokens of the sequence.

    Returns:
        This process's tokens; `None` for all of them.
    """
    context = _context_config(compat.parallel_config_of(processor))
    return None if context is None else TokenShard(compat.context_parallel_group(context), num_tokens)


def _context_config(config: Any) -> Any:
    """Return the `ContextParallelConfig` that a configuration is or holds."""
    return config if hasattr(config, "ulysses_degree") else getattr(config, "context_parallel_config", None)
