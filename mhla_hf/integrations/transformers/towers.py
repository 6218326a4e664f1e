# SPDX-License-Identifier: Apache-2.0
"""The towers of models that ask for MHLA: which of them were asked, which may keep softmax, what the files say.

A model of several towers may be asked as a whole. Its text part then has to become MHLA, unless the tokens of an image
attend to each other there in both directions; the others follow where they can. A tower that is named, or that was
MHLA when the model was saved, has to become MHLA as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ...models.stub import REFUSAL
from ...utils.compat.transformers import attention_of, set_attention
from .configuration import is_complete


logger = logging.get_logger(__name__)

NAME = "mhla"
"""Name of the attention implementation."""


class InheritedOptions(dict[str, Any]):
    """Options that a part has because the whole model was asked.

    Attributes:
        optional: Whether the part may keep softmax.
        is_text: Whether it is the text part of the model it sits in.
    """

    optional: bool = True
    is_text: bool = False


def wants_mhla(config: Any) -> bool:
    """Return whether a configuration asks for MHLA, by its options or its attention implementation."""
    return getattr(config, "mhla", None) is not None or attention_of(config) == NAME


def inherited(config: Any) -> bool:
    """Return whether MHLA was asked of a part only because the whole model was asked."""
    return isinstance(getattr(config, "mhla", None), InheritedOptions)


def may_keep_softmax(config: Any) -> bool:
    """Return whether a part was asked only because the whole model was, and is not the text part."""
    return inherited(config) and config.mhla.optional


def towers_of(config: Any) -> dict[str, Any]:
    """The configurations inside a composite one, by name."""
    towers = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    return {name: tower for name, tower in towers.items() if tower is not None}


def text_part(config: Any) -> Any:
    """The configuration of the text part of a composite model, which may be the whole; None where it is not known."""
    try:
        text = config.get_text_config(decoder=True)
    except ValueError:
        return None
    return text if text is config or any(text is tower for tower in towers_of(config).values()) else None


def prepare_config(config: Any) -> None:
    """Make `mhla` options alone enough, before a model is built.

    Options for a model of several towers go to the configuration of each tower that was asked.

    Args:
        config: The model's configuration; its attention implementation is set where it was left open.
    """
    towers = towers_of(config)
    if towers:
        _ask_towers(config, towers)
    for tower in towers.values():
        prepare_config(tower)
    if getattr(config, "mhla", None) is not None and attention_of(config) is None:
        set_attention(config, NAME)


def _ask_towers(config: Any, towers: dict[str, Any]) -> None:
    given, text = getattr(config, "mhla", None), text_part(config)
    whole = attention_of(config) == NAME
    if isinstance(given, Mapping) and given and all(str(name) in towers for name in given):
        for name, options in given.items():
            towers[str(name)].mhla = options
        config.mhla = given = None
    if (given is None and not whole) or (text is config and is_complete(given)):
        # Complete options are those of layers that the model has beside its towers, and was made with.
        return
    named = [] if whole else [tower for tower in towers.values() if attention_of(tower) == NAME]
    optional = may_keep_softmax(config)
    for tower in named or towers.values():
        if attention_of(tower) not in (None, NAME):
            continue
        options = dict(given or {})
        if tower.mhla is None:
            tower.mhla = options if named else InheritedOptions(options)
            if not named:
                tower.mhla.is_text = tower is text
                tower.mhla.optional = optional or tower is not text
        elif given is not None and not may_keep_softmax(tower):
            tower.mhla = options
    if text is not config or named:
        config.mhla = None


def keep_softmax(name: str, config: Any, implementation: str, reason: str) -> None:
    """Let one tower of a model keep softmax, and says so in one line.

    Args:
        name: Its name in the line.
        config: The tower's configuration.
        implementation: The attention that it uses instead.
        reason: Reason for it.
    """
    config.mhla = None
    if attention_of(config) == NAME:
        set_attention(config, implementation)
    # Its own model may have marked it before it turned out that it has nothing that can be MHLA.
    mark(config)
    logger.warning_once(f"{name} keeps softmax: {reason}. The parts of this model that can be MHLA are.")


def keep_softmax_in_unserved(model: Any) -> None:
    """Take the request from towers that have no attention of their own, if a whole model was asked.

    Raises:
        ValueError: If such a tower was named.
    """
    for name, tower in towers_of(model.config).items():
        if attention_of(tower) != NAME or towers_of(tower):
            continue
        which, reason = f"{name} of {type(model).__name__}", "it has no attention that can be MHLA"
        if may_keep_softmax(tower):
            keep_softmax(which, tower, "sdpa", reason)
        elif tower.mhla is None and any(getattr(module, "config", None) is tower for module in model.modules()):
            raise ValueError(f"{which} cannot use attn_implementation='mhla': {reason}.")


def mark(config: Any) -> None:
    """Write the attention implementation and the refusal into the configuration that is saved.

    Libraries and readers without this package then stop with an error instead of loading the model as softmax.
    """
    found = implementations(config)
    if found:
        config.attn_implementation = found
    else:
        config.__dict__.pop("attn_implementation", None)
    _mark_refusal(config)


def _mark_refusal(config: Any) -> bool:
    """Set the entry of `mhla_hf.models.stub` on a configuration and on its towers, which may be loaded alone."""
    towers = [_mark_refusal(tower) for tower in towers_of(config).values()]
    is_mhla = getattr(config, "mhla", None) is not None or any(towers)
    if is_mhla:
        config.__dict__["transformers_weights"] = REFUSAL
    elif getattr(config, "transformers_weights", None) is None:
        config.__dict__.pop("transformers_weights", None)
    return is_mhla


def implementations(config: Any) -> Any:
    """`"mhla"`, a dict of towers, or None."""
    own = NAME if getattr(config, "mhla", None) is not None else None
    found = {name: implementations(tower) for name, tower in towers_of(config).items()}
    found = {name: value for name, value in found.items() if value}
    if not towers_of(config):
        return own
    # The empty name is that of the model's own layers.
    return {**({"": own} if own else {}), **found} or None


def remember(config: Any) -> list[tuple[Any, Any, Any]]:
    """Options and implementations of a configuration and its towers, for [`restore`]."""
    entries = [(config, getattr(config, "mhla", None), attention_of(config))]
    return entries + [entry for tower in towers_of(config).values() for entry in remember(tower)]


def restore(entries: list[tuple[Any, Any, Any]]) -> None:
    """Restore the state of [`remember`]."""
    for config, mhla, implementation in entries:
        config.mhla = mhla
        set_attention(config, implementation)
