# SPDX-License-Identifier: Apache-2.0
"""Gives the self-attention modules of a transformers model their `mhla` submodules, or says why it cannot."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from ...config import MHLAConfig, layer_groups
from ...layers import weight_record
from ...layers.mhla import MHLA
from ...models.loading import is_identity
from ...models.registry import TRANSFORMERS_FAMILIES, recovery_advice
from ...models.weight_files import check_saved
from ...ops.sums import HeadGroups
from ...utils.compat import forward_parameters, has_mhla, note_unchecked
from ...utils.compat.transformers import attention_of, set_attention, supports_sdpa
from . import configuration, limits, modules, towers
from .functions import LayerInputsHook, ModelInputsHook
from .towers import NAME, inherited, keep_softmax, mark, may_keep_softmax, text_part, towers_of, wants_mhla


logger = logging.get_logger(__name__)

_INPUTS = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")
_REFUSED = " cannot use attn_implementation='mhla': "
_NOT_DISPATCHING = (
    "its attention does not go through transformers' attention interface. mhla_hf.supported_models() lists models "
    "that were tested."
)
_WITHOUT_WINDOWS = (
    " Where the model can do without windows, load it with sliding_window=None, or with layer_types of full_attention "
    "alone: the layers then attend to the whole text."
)
_SOFTMAX = {"sdpa", "eager"}
_HEADS = ("num_heads", "num_key_value_heads")
_LOOKS_AHEAD = "the tokens of an image attend to each other in both directions"


def prepare(model: PreTrainedModel, config: Any) -> bool:
    """Hand a request for MHLA to the towers of a model, and check what can be checked before anything is built.

    Args:
        model: The model, which is about to be built.
        config: Its configuration.

    Returns:
        Whether it is the configuration of a model that was saved as MHLA.

    Raises:
        ValueError: If the model cannot be MHLA, or has sizes that no model has.
    """
    if getattr(config, "auto_map", None):
        from ...models.stub import forget_stub

        forget_stub(config)
    stored = any(
        configuration.is_complete(getattr(part, "mhla", None)) for part in (config, *towers_of(config).values())
    )
    towers.prepare_config(config)
    if wants_mhla(config) and not modules.can_dispatch(type(model)):
        if may_keep_softmax(config) or text_part(config) is config or not towers_of(config):
            _refuse(model, config, f"{type(model).__name__}{_REFUSED}{_NOT_DISPATCHING}")
        else:
            # Its towers are asked when they are built; what it has beside them is not meant.
            set_attention(config, _softmax_of(model))
    check_text(model, config)
    if wants_mhla(config):
        limits.check_sizes(vars(config), str(config.name_or_path or type(config).__name__))
    return stored


def attach(model: PreTrainedModel) -> None:
    """Give the model's own self-attention modules their `mhla` where its configuration asks for MHLA.

    A second call does nothing.

    Args:
        model: A model at the end of its constructor.

    Raises:
        ValueError: If the model cannot be served; the message gives the reason.
    """
    attentions = _attentions(model) if _sees_inputs(model) else []
    if attentions and not any(hasattr(module, "mhla") for _, module in attentions):
        try:
            _attach_to(model, attentions)
        except ValueError as error:
            _refuse(model, model.config, str(error))
    if wants_mhla(model.config) and _is_whole(model) and not has_mhla(model):
        _refuse(model, model.config, f"{type(model).__name__}{_REFUSED}{_nothing_served(model)}")
    towers.keep_softmax_in_unserved(model)
    mark(model.config)
    note_unchecked("transformers")


def _refuse(model: PreTrainedModel, config: Any, message: str) -> None:
    """Let a part that was asked as part of a whole keep softmax; raise an error for others."""
    if may_keep_softmax(config):
        reason = (message.partition(_REFUSED)[2] or message).rstrip(".")
        keep_softmax(type(model).__name__, config, _softmax_of(model), reason)
        return
    other = " Other parts can be asked by name, as in attn_implementation={'vision_config': 'mhla'}."
    raise ValueError(f"{message}{other if inherited(config) else ''}")


def _softmax_of(model: PreTrainedModel) -> str:
    return "sdpa" if supports_sdpa(model) else "eager"


def check_text(model: PreTrainedModel, config: Any) -> None:
    """Refuse MHLA in the text part of a composite model that changes the mask of its text for images.

    A text part that was asked for as part of a whole model keeps softmax instead.

    Args:
        model: The model, whose parts need not be built yet.
        config: Its configuration.

    Raises:
        ValueError: If the text part of such a model is asked for MHLA by name.
    """
    text = text_part(config)
    if not _text_looks_ahead(model, config) or not wants_mhla(text):
        return
    name = f"The text of {type(model).__name__}"
    if not inherited(text):
        raise ValueError(f"{name}{_REFUSED}{_LOOKS_AHEAD}.")
    keep_softmax(name, text, _softmax_of(model), _LOOKS_AHEAD)
    # Also where options alone asked for the whole: it is an error if no other part can be MHLA.
    set_attention(config, NAME)


def _text_looks_ahead(model: PreTrainedModel, config: Any) -> bool:
    text = text_part(config)
    return text is not None and text is not config and modules.looks_ahead_in_images(model, text)


def _nothing_served(model: PreTrainedModel) -> str:
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if any(_text_looks_ahead(part, part.config) for part in parts):
        return f"in its text {_LOOKS_AHEAD}, and no other part of it can be MHLA."
    return _NOT_DISPATCHING if _has_attention(model) else "it has no self-attention."


def _attach_to(model: PreTrainedModel, attentions: list[tuple[str, nn.Module]]) -> None:
    config: Any = attentions[0][1].config
    model_name = type(model).__name__
    is_optional = may_keep_softmax(config) and not config.mhla.is_text
    for name, module in attentions:
        reason = modules.unsupported_reason(module) or modules.packed_reason(model)
        if reason is None and not modules.keywords_reach(model, name):
            reason = "its layers drop keyword arguments in this version of transformers"
        if reason is None and is_optional and config.model_type not in TRANSFORMERS_FAMILIES:
            reason = "it was not tested with MHLA, and becomes MHLA only where it is asked by name"
        if reason is not None:
            raise ValueError(f"{model_name}{_REFUSED}{reason}.")
    given = [getattr(module, "layer_idx", None) for _, module in attentions]
    indices = [position if index is None else int(index) for position, index in enumerate(given)]
    windows = {index: modules.window_reason(module, index) for index, (_, module) in zip(indices, attentions)}
    options = _resolve(config, attentions[0][1])
    chosen = _chosen_layers(model_name, options, indices, windows)
    if isinstance(options.layers, str):
        options = options.replace(layers=sorted(chosen))
    is_whole = len(chosen) == len(indices) and not any(chosen.values())
    if config.model_type not in TRANSFORMERS_FAMILIES:
        logger.warning_once(f"{model_name} was not tested with MHLA; mhla_hf.supported_models() lists those that are.")
    prefix = modules.num_prefix_tokens(model) if not options.is_sequence else 0
    for index, (_, module) in zip(indices, attentions):
        if index not in chosen:
            continue
        _check_rotary(module, options)
        heads = modules.heads_of(module)
        groups = _groups(f"layer {index} of {model_name}", options, chosen[index], heads)
        if groups is not None:
            heads |= {name: heads[name] // groups.count * len(groups.own) for name in _HEADS}
        module.mhla = MHLA(options, num_prefix_tokens=prefix, **heads)
        module.mhla.groups = groups
        module.register_forward_pre_hook(LayerInputsHook(module, index, is_whole), with_kwargs=True)
    model.register_forward_pre_hook(ModelInputsHook(model), with_kwargs=True)
    config.mhla = options.to_dict()


def _resolve(config: Any, attention: nn.Module) -> MHLAConfig:
    if modules.is_image_model(config):
        return configuration.resolve_image(config.mhla, modules.patch_grid(config))
    tested = TRANSFORMERS_FAMILIES.get(config.model_type)
    return configuration.resolve_sequence(
        config.mhla,
        causal=bool(getattr(attention, "is_causal", True)),
        head_dim=modules.heads_of(attention)["head_dim"],
        positions=configuration.max_positions(config),
        rope="before_feature_map" if tested is None else tested.rope,
    )


def _groups(where: str, options: MHLAConfig, own: tuple[int, ...], heads: dict[str, int]) -> HeadGroups | None:
    """The groups of heads that are MHLA in a layer where others stay softmax."""
    count = heads["num_key_value_heads"]
    if own and own[-1] >= count:
        raise ValueError(f"layers names group {own[-1]} of {where}, which has key/value heads 0 to {count - 1}.")
    if len(own) in (0, count):
        return None
    if not options.causal:
        raise ValueError(f"layers names single groups of {where}: only models that look back only can have these.")
    return HeadGroups(own, count)


def _chosen_layers(
    model_name: str, options: MHLAConfig, indices: list[int], windows: dict[int, str | None]
) -> dict[int, tuple[int, ...]]:
    """The layers that become MHLA, and which of their groups of heads; none for all."""
    if options.layers is None or isinstance(options.layers, str):
        # A fraction is of all layers; those that cannot be MHLA stay softmax in any case.
        places = options.mhla_layers(len(indices))
        chosen = {indices[place] for place in places if windows[indices[place]] is None}
        if not chosen:
            raise ValueError(
                f"{model_name}{_REFUSED}no layer can be MHLA, the first one because {windows[indices[0]]}."
                f"{_WITHOUT_WINDOWS if 'sliding' in str(windows[indices[0]]) else ''}"
            )
        return dict.fromkeys(chosen, ())
    groups = layer_groups(options.layers)
    for index in groups:
        reason = windows.get(index, f"the model has layers {indices[0]} to {indices[-1]}")
        if reason is not None:
            raise ValueError(f"Layer {index} of {model_name} cannot be MHLA: {reason}.")
    return groups


def _check_rotary(attention: nn.Module, options: MHLAConfig) -> None:
    if options.rope != "after_feature_map" or not modules.uses_rotary(attention):
        return
    if modules.rotation_of(attention) is None or modules.rotates_sometimes(attention):
        raise ValueError(
            f"{type(attention).__name__} rotates its queries in a way that cannot be undone; "
            "use mhla={'rope': 'before_feature_map'}."
        )


def _attentions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The self-attention modules of a model's own configuration, if that asks for MHLA.

    Those of an inner model's configuration were seen to when that one was built.
    """
    if not wants_mhla(model.config):
        return []
    return [(name, module) for name, module in modules.self_attentions(model) if module.config is model.config]


def _sees_inputs(model: nn.Module) -> bool:
    """Return whether a model gets the inputs that [`ModelInputsHook`] reads; encoders inside a model may not."""
    return any(name in forward_parameters(model) for name in _INPUTS)


def _is_whole(model: nn.Module) -> bool:
    """Return whether a model would hold all attention of its configuration, and is no mere part of it."""
    parameters = forward_parameters(model)
    is_called = _sees_inputs(model) or getattr(model, "main_input_name", "") in parameters
    return "input_ids" in parameters or (is_called and _has_attention(model))


def _has_attention(model: nn.Module) -> bool:
    return any("Attention" in type(module).__name__ for module in model.modules())


def initialize(module: MHLA) -> None:
    """Initialise the parameters that no checkpoint gave; those that were loaded stay as they are."""
    for name, parameter in module.named_parameters():
        value = module.initial_tensor(name).to(parameter.device)
        if hasattr(parameter, "device_mesh"):
            from .tensor_parallel import as_distributed

            value = as_distributed(value, parameter)
        init.copy_(parameter, value)


def convert_transformers_model(
    model: PreTrainedModel,
    mhla: MHLAConfig | Mapping[str, Any] | None = None,
    *,
    without_weights: bool = False,
    copy_config: bool = True,
) -> Any:
    """Turn a loaded softmax model into its MHLA version, in place.

    Every weight is kept; the new parameters are initialised in the dtype and on the device of their layer.
    `model.set_attn_implementation("sdpa")` switches back to softmax, and `mhla_hf.unconvert` turns it back, as long as
    nothing was trained.

    Args:
        model: A model of transformers.
        mhla: The options; a dict may hold a dict for each tower (`{"vision_config": {...}}`).
        without_weights: Also take a model on the meta device.
        copy_config: Give the model a copy of its configuration, which other models may hold as well. Without it, a
            model around this one is saved as MHLA too.

    Returns:
        The same object.

    Raises:
        ValueError: If the model cannot be served or is MHLA already. Nothing is changed then.
    """
    reason = None
    if has_mhla(model):
        reason = "MHLA already; load its softmax original to convert it again"
    elif any(hasattr(one, "device_mesh") or (one.is_meta and not without_weights) for one in model.parameters()):
        reason = "offloaded or split. Convert the checkpoint first (mhla-hf convert) and load the result"
    elif len(dict(model.named_parameters())) > len(weight_record.base_parameters(model)):
        # Saved adapters would leave out what is new.
        reason = "given adapters already. Convert it first, and add them with modules_to_save=['mhla']"
    if reason is not None:
        raise ValueError(f"This {type(model).__name__} is {reason}.")
    shared = _copy_configs(model) if copy_config else []
    before = towers.remember(model.config)
    for config, _, _ in before:
        set_attention(config, None)
    model.config.mhla = {} if mhla is None else mhla
    try:
        towers.prepare_config(model.config)
        models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        for part in models:
            check_text(part, part.config)
        # From the inside out, as constructors run.
        for part in reversed(models):
            attach(part)
        if not has_mhla(model):
            _refuse(model, model.config, f"{type(model).__name__}{_REFUSED}{_nothing_served(model)}")
    except Exception:
        _detach(model)
        towers.restore(before)
        for module, name, config in shared:
            setattr(module, name, config)
        raise
    for config, _, implementation in before:
        if config.mhla is None:
            set_attention(config, implementation)
    for attention in [module for module in model.modules() if isinstance(getattr(module, "mhla", None), MHLA)]:
        weight = next(parameter for name, parameter in attention.named_parameters() if not name.startswith("mhla."))
        dtype = weight.dtype if weight.is_floating_point() else model.dtype
        attention.mhla.to(device=weight.device, dtype=dtype).train(attention.training)
    mark(model.config)
    model.set_attn_implementation(NAME)
    weight_record.record_weights(model)
    if not without_weights:
        warn_of_fresh(model, [name for name, _ in model.named_parameters()])
    return model


def warn_of_fresh(model: PreTrainedModel, names: Collection[str]) -> None:
    """Warn of newly initialised MHLA parameters, and say what to do next.

    Args:
        model: The model.
        names: Names of the parameters that no checkpoint gave, others among them.
    """
    fresh, class_name = [name for name in names if ".mhla." in name], type(model).__name__
    # A normaliser's scale starts as 1, which is what weights without it have been trained with.
    if not all(name.endswith(".normalizer_scale") for name in fresh):
        has_towers = isinstance(towers.implementations(model.config), dict)
        advice = recovery_advice(class_name, is_same=is_identity(fresh), has_towers=has_towers)
        logger.warning(f"{class_name}: {len(fresh)} MHLA parameter(s) are newly initialised. {advice}")


def _copy_configs(model: PreTrainedModel) -> list[tuple[nn.Module, str, Any]]:
    """Give a model a copy of its configuration, which others may hold as well.

    Returns:
        Modules, the names of their attributes, and the configurations that these had.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    shared = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, PreTrainedConfig) and id(value) in copies
    ]
    for module, name, value in shared:
        setattr(module, name, copies[id(value)])
    return shared


def record(model: PreTrainedModel, missing: Collection[str] | None = None) -> None:
    """Start the record of a model's weights, when it was built or loaded.

    Args:
        model: The model.
        missing: Names of the parameters that its checkpoint lacked; `None` for a model that was built.

    Raises:
        ValueError: If weights that are not the pretrained ones are to be used with softmax attention.
    """
    state = "converted"
    if missing is not None and any(".mhla." in name and name not in missing for name in model.state_dict()):
        state = getattr(model.config, weight_record.STATE_KEY, "trained")
    elif missing is None and any(module.record for module in model.modules() if isinstance(module, MHLA)):
        # Built around a model that may have been trained before.
        state = weight_record.weights_state(model)
    softmax = NAME not in _implementations(model)
    if softmax and state != "converted":
        raise ValueError(
            f"Cannot use softmax attention: the pretrained weights of this {type(model).__name__} are not known: it "
            f"was {state} before it was saved. Use the softmax original."
        )
    weight_record.record_weights(model, state, softmax)


def _implementations(model: PreTrainedModel) -> set[Any]:
    """The attention that the MHLA layers of a model are asked for: `"mhla"`, or others.

    Raises:
        ValueError: If some are asked for MHLA and some are not.
    """
    found = {attention_of(module.config) for module in model.modules() if _is_converted(module)}
    if NAME in found and len(found) > 1:
        names = " and ".join(sorted(map(repr, found)))
        raise ValueError(f"All MHLA layers of {type(model).__name__} use one attn_implementation, not {names}.")
    return found


@contextmanager
def switching(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the attention implementation of a model with MHLA layers is set.

    Raises:
        ValueError: If the model cannot compute it with its pretrained weights; nothing is changed then.
    """
    before = towers.remember(model.config)
    try:
        yield
        for part in model.modules():
            if isinstance(part, PreTrainedModel) and getattr(part.config, "mhla", None) is None and _attentions(part):
                raise ValueError(
                    f"{type(part).__name__} has no MHLA parameters, and other parts of this {type(model).__name__} "
                    f"have. Name those alone: set_attn_implementation({towers.implementations(model.config)})."
                )
        found = _implementations(model)
        if found == {NAME}:
            weight_record.switch_to_mhla(model)
        elif not weight_record.is_softmax(model):
            # Continuous batching takes flash attention where it can, without being asked.
            if not found <= _SOFTMAX:
                raise ValueError(f"{type(model).__name__} has MHLA layers: they switch to 'sdpa' or 'eager' alone.")
            weight_record.switch_to_softmax(model)
    except Exception:
        towers.restore(before)
        raise


@contextmanager
def saving(model: PreTrainedModel, state_dict: dict[str, Any] | None) -> Iterator[dict[str, Any] | None]:
    """A context in which a model with MHLA layers is saved: without MHLA where it is switched to softmax.

    Args:
        model: The model. Its configuration says what was done to its weights.
        state_dict: The tensors to save, which may be any; `None` for those of the model.

    Yields:
        The tensors to save, likewise.

    Raises:
        ValueError: If adapters are among them.
    """
    check_saved(model, state_dict)
    if not weight_record.is_softmax(model):
        state = weight_record.weights_state(model) if state_dict is None else "trained"
        setattr(model.config, weight_record.STATE_KEY, state)
        # Options may have been changed by hand.
        mark(model.config)
        yield state_dict
        return
    state_dict = model.state_dict() if state_dict is None else state_dict
    shared = _copy_configs(model)
    try:
        _forget_mhla(model)
        yield {name: tensor for name, tensor in state_dict.items() if ".mhla." not in name}
    finally:
        for module, name, config in shared:
            setattr(module, name, config)


def unconvert_transformers_model(model: PreTrainedModel) -> Any:
    """Turn an MHLA model without adapters back into its softmax original, in place.

    Args:
        model: A converted model of transformers.

    Returns:
        The same object.

    Raises:
        ValueError: If its pretrained weights are not known; nothing is changed then.
    """
    tensors = weight_record.base_parameters(model)
    with torch.no_grad():
        for name, value in weight_record.original_values(model, "restore softmax attention").items():
            tensors[name].copy_(value)
    _detach(model)
    _forget_mhla(model)
    return model


def _forget_mhla(model: PreTrainedModel) -> None:
    """Remove MHLA from the configurations of a model."""
    # Attention modules may have another configuration than the model around them.
    owners = [module for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)]
    for module in sorted(owners, key=lambda module: not isinstance(module, PreTrainedModel)):
        if attention_of(module.config) == NAME:
            set_attention(module.config, _softmax_of(module if isinstance(module, PreTrainedModel) else model))
        vars(module.config).pop("mhla", None)
    for module in owners:
        mark(module.config)
    vars(model.config).pop(weight_record.STATE_KEY, None)


def _is_converted(module: nn.Module) -> bool:
    """Return whether a module has an MHLA layer, which an adapter may have wrapped."""
    return isinstance(module._modules.get("mhla"), nn.Module)


def _detach(model: nn.Module) -> None:
    """Remove the MHLA modules of a model, and the hooks that hand them their inputs."""
    for module in model.modules():
        if _is_converted(module):
            del module.mhla
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, (LayerInputsHook, ModelInputsHook)):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
