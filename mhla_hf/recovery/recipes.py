# SPDX-License-Identifier: Apache-2.0
"""Recipes: options of conversion and recovery, as a small YAML file or the default of the model's family.

A recipe is checked in full before anything is loaded. `docs/recovery.md` describes its fields, which are those of the
classes here.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ..config import MHLAConfig, automatic_measure, automatic_share, layer_groups, parse_keep, parse_layers
from ..models.registry import RECOVERED, names_of
from ..training.config import LONGEST_SIDE, LONGEST_TEXT, MOST_FRAMES, MOST_SAMPLES, RECORD_CACHES
from ..utils.messages import check_choice, did_you_mean, shorten_text
from ..utils.options import Options, check_names, option


logger = logging.getLogger(__name__)

VIDEO = names_of(RECOVERED, kind="video")
IMAGES = names_of(RECOVERED, kind="image")
TEXT = ("causal", "encoder")
FAMILIES = (*VIDEO, *IMAGES, *TEXT, "vision")
"""The diffusion models by the names that `mhla-hf models` gives; `causal` language models, `encoder`s of text, and
`vision` transformers."""

TRANSFORMERS = (*TEXT, "vision")
_CALLED = {"causal": "language models", "encoder": "text encoders", "vision": "vision models"}
DATA_FREE = names_of(RECOVERED, data_free=True)
"""Families that need no data: the inputs of their model while the pipeline makes samples are enough to calibrate and
match on."""

WITHOUT_OBJECTIVE = names_of(RECOVERED, objective="")
"""Families without an objective of training, that data could be used for."""
MOST_STEPS = 10**7
MOST_IN_BATCH = 2**16
_MHLA_RATE = "Peak learning rate of the parameters that MHLA adds. Default: the same."
_FOLDER = Path(__file__).parents[1] / "recipes"
_MOST_BYTES = 1 << 16
LEAST_RECORDS = 8  # Batches that samples without noise are recorded in at least, so that an eighth can be held out.
_TEXTS = ("family", "layers", "text_field")  # Even where YAML reads them as something else.
VARIANTS = ("fast", "paper")
"""Names of other recipes for many families; `fast` is changes to the default recipe."""


def _count(default: int, help: str, minimum: int = 1, maximum: int = MOST_STEPS) -> int:
    return option(default, help, minimum=minimum, maximum=maximum)


def _side(help: str) -> int | None:
    return option(None, help, minimum=8, maximum=LONGEST_SIDE, families=(*VIDEO, *IMAGES, "vision"))


@dataclass(frozen=True, kw_only=True)
class DataOptions(Options):
    """Amount and size of the data."""

    samples: int = option(2048, "Maximum number of samples to train on.", minimum=1, maximum=MOST_SAMPLES)
    held_out: int = option(
        96, "Samples held out for measurement; at most a fifth of all.", minimum=1, maximum=MOST_SAMPLES
    )
    max_length: int | None = option(
        None,
        "Tokens per row, or at most per passage or prompt. Default: 512 for language models, 128 for encoders.",
        minimum=2,
        maximum=LONGEST_TEXT,
        families=(*TEXT, *dict.fromkeys(WITHOUT_OBJECTIVE + DATA_FREE)),
    )
    text_field: str | None = option(None, "Field of texts or chats. Default: messages, else text.", families=TEXT)
    height: int | None = _side("Height in pixels. Default: the model's own, 480 for videos; of its image processor.")
    width: int | None = _side("Width in pixels. Default: the model's own, 832 for videos; of its image processor.")
    num_frames: int | None = option(
        None, "Frames of a video. Default: 81.", minimum=1, maximum=MOST_FRAMES, families=VIDEO
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Options):
    """Calibration: each layer is fitted to the original's on a small probe."""

    batches: int = _count(24, "Number of batches to run.", minimum=2)
    batch_size: int = _count(16, "Batch size.", maximum=MOST_IN_BATCH)
    fit_steps: int = _count(300, "Training steps per layer for feature maps and mixing weights.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class PartOptions(Options):
    """Training of one part of the model after another, from records of the original."""

    steps: int = _count(600, "Average optimizer steps per layer; layers that matter more get more.")
    batches: int = _count(160, "Number of batches to record activations of.")
    batch_size: int = _count(1, "Batch size.", maximum=MOST_IN_BATCH)
    optimizer: str = option("muon", "Optimizer of the matrices.", choices=("muon", "adam"))
    learning_rate: float = option(6e-3, "Peak learning rate of what the original has.", above=0)
    mhla_learning_rate: float = option(2e-2, "Peak learning rate of the parameters that MHLA adds.", above=0)

    @property
    def held_out(self) -> int:
        """How many of the batches are not trained on, but decide whether a part keeps what it learned: an eighth."""
        return min(self.batches - 1, max(1, self.batches // 8))


@dataclass(frozen=True, kw_only=True)
class MatchOptions(PartOptions):
    """Matching: each layer alone learns the output of the layer it replaced."""

    cache: str = option(
        "auto", "Where to keep activations; auto uses memory if they fit, else the disk.", choices=RECORD_CACHES
    )


@dataclass(frozen=True, kw_only=True)
class BlockwiseOptions(PartOptions):
    """Block matching: each block learns the original's hidden states, on the inputs it has now."""

    steps: int = _count(230, "Average optimizer steps per block; blocks that matter more get more.")
    batches: int = _count(320, "Number of batches to record hidden states of.")
    learning_rate: float = option(1e-3, "Peak learning rate of what the original has.", above=0)
    mhla_learning_rate: float = option(4e-3, "Peak learning rate of the parameters that MHLA adds.", above=0)


@dataclass(frozen=True, kw_only=True)
class DistillOptions(Options):
    """Distillation: the whole model learns the original's prediction."""

    steps: int = _count(90, "Optimizer steps.")
    batch_size: int = _count(4, "Batch size.", maximum=MOST_IN_BATCH)
    learning_rate: float = option(2e-4, "Peak learning rate.", above=0)
    mhla_learning_rate: float | None = option(None, _MHLA_RATE, above=0)
    ratio: float = option(
        1.0, "Weight of the distance to the original; the rest is the loss on data.", above=0, maximum=1
    )
    temperature: float | None = option(
        None, "Temperature of both distributions. Default: 1.", above=0, families=TRANSFORMERS
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Options):
    """Fine-tuning: the whole model trains on its own objective."""

    steps: int = _count(2000, "Optimizer steps.")
    batch_size: int = _count(8, "Batch size.", maximum=MOST_IN_BATCH)
    learning_rate: float = option(2e-5, "Peak learning rate.", above=0)
    mhla_learning_rate: float | None = option(None, _MHLA_RATE, above=0)


@dataclass(frozen=True)
class Stage:
    """A stage of a recovery. The function of its name in `recovery.stages`, which needs torch, runs it.

    Attributes:
        title: Name of the state in which it leaves the model.
        options: Its options; their docstring says in model cards what it does.
        part: What it works on at a time: `layer`, `block` or the whole `model`. A stage of layers changes nothing
            outside of these.
        memory: Bytes for each parameter of that part in training, of gradients, optimizer states and kept originals;
            0 for a stage that is no training, and has no `steps`.
        needs_objective: Whether it computes the loss of the model's own objective on data.
    """

    title: str
    options: type[Options]
    part: Literal["layer", "block", "model"]
    memory: int = 0
    needs_objective: bool = False

    @property
    def description(self) -> str:
        """What it does, as an entry of a list."""
        text = self.options.__doc__ or self.title
        return text[:1].lower() + text[1:].removesuffix(".")


STAGES = {
    "calibrate": Stage("calibrated", CalibrateOptions, "layer"),
    "match": Stage("matched", MatchOptions, "layer", memory=12),
    "blockwise": Stage("blocks matched", BlockwiseOptions, "block", memory=12),
    "distill": Stage("distilled", DistillOptions, "model", memory=16, needs_objective=True),
    "finetune": Stage("fine-tuned", FinetuneOptions, "model", memory=12, needs_objective=True),
}
"""The stages in their order. Those that a recipe does not name are left out."""

FORMER = "blocks"
"""The stage `blockwise` in earlier versions."""

SECTIONS: dict[str, type[Options]] = {"data": DataOptions, **{name: each.options for name, each in STAGES.items()}}


def choose_layers(layers: str, count: int) -> list[int]:
    """Return the indices of a choice of layers, see [`Recipe`]; of a model with a single one always that."""
    share = automatic_share(layers)
    chosen = parse_layers(layers if share is None else str(share), count) if count > 1 else None
    return list(range(count) if chosen is None else layer_groups(chosen))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Conversion and recovery of a model of one family.

    Attributes:
        family: One of [`FAMILIES`].
        layers: Which layers become MHLA: `all`, indices, a fraction such as `2/3`, or `auto:2/3`, which keeps those
            softmax that are worst to replace; `auto:2/3:lookup` and `auto:2/3:error` say by what.
        mhla: Options of [`MHLAConfig`]; the model's own for what is not given.
        data: Amount and size of the data.
        stages: Options of its stages by their names, in order.
        name: Name in errors.
    """

    family: str
    layers: str = "all"
    mhla: Mapping[str, Any] = field(default_factory=dict)
    data: DataOptions = DataOptions()
    stages: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="recipe", compare=False)

    @property
    def chooses_groups(self) -> bool:
        """Whether groups of heads are chosen by measurement, so that every layer may become MHLA in part."""
        is_chosen = automatic_share(self.layers) not in (None, 1) and automatic_measure(self.layers) != "error"
        return is_chosen and self.family == "causal"

    @property
    def needs_objective(self) -> bool:
        """Whether a stage computes the loss of the model's own objective."""
        return any(STAGES[name].needs_objective for name in self.stages)

    def record_bytes(self, of_layers: int, of_blocks: int, from_calls: bool = False) -> tuple[int, int]:
        """Return the size of what matching of layers keeps, in memory or on the disk, and that of blocks in memory.

        Batches that no step takes are not kept; the layer with the most steps takes at least the average.

        Args:
            of_layers: Bytes of one sample in the layers.
            of_blocks: Bytes of one sample in the blocks.
            from_calls: Whether batches are calls of the pipeline's model.
        """
        sizes = {"layer": of_layers, "block": of_blocks}
        kept = dict.fromkeys(sizes, 0)
        for name, options in self.stages.items():
            stage = STAGES[name]
            if stage.part in sizes and stage.memory and getattr(options, "cache", "") != "none":
                samples = RECOVERED[self.family].call_samples if from_calls else options.batch_size
                if self.family in (*TEXT, "vision"):
                    samples = max(1, min(samples, self.data.samples // LEAST_RECORDS))
                batches = min(options.batches, options.steps + options.held_out)
                kept[stage.part] += round(sizes[stage.part] * samples * batches)
        return kept["layer"], kept["block"]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON values, without its name."""
        content = dataclasses.asdict(self)
        stages = content.pop("stages")
        del content["name"]
        return {**content, **dict.fromkeys(STAGES), **stages}

    def values(self) -> dict[str, Any]:
        """Its values by their path, such as `match.steps`."""
        values: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if isinstance(value, dict):
                values |= {f"{name}.{key}": each for key, each in value.items()}
            else:
                values[name] = value
        return values

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with some values changed, checked again.

        Args:
            changes: Values by their path, such as `match.steps`; of a stage that the recipe leaves out, the rest is
                the stage's defaults. `None` for a stage leaves it out.

        Raises:
            ValueError: As for [`parse_recipe`].
        """
        if not changes:
            return self
        content = {name: value for name, value in self.to_dict().items() if value is not None}
        for path, value in changes.items():
            section, _, name = present_name(path, warn=True).partition(".")
            if name:
                content[section] = {**(content.get(section) or {}), name: value}
            elif value is None:
                content.pop(section, None)
            else:
                content[section] = value
        return parse_recipe(content, self.name)

    def only(self, stages: tuple[str, ...]) -> Recipe:
        """A copy that goes through some of the stages only; those that it lacks get their defaults."""
        stages = tuple(present_name(name, warn=True) for name in stages)
        left_out = {name: None for name in STAGES if name not in stages}
        return self.changed({**left_out, **{name: {} for name in stages if name not in self.stages}})

    def with_budget(self, factor: float) -> Recipe:
        """A copy with that many times the steps in every stage that trains, one at least.

        Raises:
            ValueError: If a stage would have more steps than allowed.
        """
        trained = {name: options for name, options in self.stages.items() if STAGES[name].memory}
        return self.changed({f"{name}.steps": max(1, round(each.steps * factor)) for name, each in trained.items()})


@functools.cache
def _deprecate() -> None:
    logger.warning("the stage blocks is called blockwise now; the old name is deprecated")


def present_name(path: Any, warn: bool = False) -> str:
    """Return a stage, or the path of one of its options, by the name that the stage has now.

    Args:
        path: Such as `match`, `blocks.steps` or `recipe.blocks.steps`.
        warn: Log a warning, once, if it is a former name.
    """
    present = re.sub(rf"^(recipe\.)?{FORMER}(?=\.|$)", r"\1blockwise", str(path))
    if warn and present != path:
        _deprecate()
    return present


def check_arguments(
    recipe: Any, layers: Any, keep: Any, budget: Any, stages: Any, changes: Mapping[str, Any] | None, by: Any = None
) -> Recipe | None:
    """Check what can be checked of the arguments of a recovery before its model is known.

    Returns:
        The recipe, unless it is one of the defaults of the model's family.

    Raises:
        ValueError: If one of them is wrong.
    """
    if layers is not None and keep is not None:
        raise ValueError("keep cannot be given with layers")
    if by is not None and keep is None:
        raise ValueError("by says how keep chooses layers: give keep too, or layers such as auto:2/3:error")
    if keep is not None:
        parse_keep(keep, by)
    if layers is not None and automatic_share(layers) is None:
        MHLAConfig(layers=layers)
    if budget is not None and not 0 < budget <= MOST_STEPS:
        raise ValueError(f"budget must be a number above 0 and at most {MOST_STEPS:,}, got {budget!r:.100}")
    for name in () if stages is None else stages or ("",):
        check_choice("stages", present_name(name, warn=True), STAGES)
    for path, value in (changes or {}).items():
        section, _, name = present_name(path, warn=True).partition(".")
        if name and section in SECTIONS:
            _section(section, {name: value}, None)
    return None if recipe is None or recipe in VARIANTS else load_recipe(recipe)


def models_of(*families: str) -> str:
    """Return what messages call the models of some families: `"wan, dit models, language models"`."""
    diffusion = ", ".join(family for family in families if family not in _CALLED)
    return ", ".join(
        [f"{diffusion} models"] * bool(diffusion) + [_CALLED[name] for name in families if name in _CALLED]
    )


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def packaged_recipes(family: str) -> dict[str, Recipe]:
    """Return the recipes that come with the package for models of a family, by name."""
    recipes = {name: load_recipe(name) for name in recipe_names()}
    return {name: recipe for name, recipe in recipes.items() if recipe.family == family}


def load_recipe(location: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        location: A file, or the name of a recipe that comes with the package.

    Raises:
        ValueError: If there is none, the file is not YAML, or something in it is wrong. The message names the file,
            the path of the key (`match.steps`) and what is allowed.
    """
    path, names = Path(location).expanduser(), [*VARIANTS, *recipe_names()]
    if str(location) in recipe_names():
        path = _FOLDER / f"{location}.yaml"
    elif path.suffix not in (".yaml", ".yml") or not path.is_file():
        raise ValueError(
            f"recipe={shorten_text(str(location))} is neither a .yaml file nor one of {', '.join(names)}."
            f"{did_you_mean(str(location), names)}"
        )
    return parse_recipe(_read_yaml(path), f"recipe {path}")


def _read_yaml(path: Path) -> Any:
    """Read a small YAML file of plain values.

    Raises:
        ValueError: If it is too large, is not YAML, or has aliases: a few nested ones expand beyond any memory.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"recipe {path} is larger than {_MOST_BYTES:,} bytes")
    try:
        return yaml.load(content, Loader=_Loader)
    # Wrong tags and dates raise anything.
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"recipe {path} is not valid YAML: {shorten_text(str(error), 200)}") from None


class _Loader(yaml.SafeLoader):
    """YAML without aliases, whose numbers may be `3e-3`, a string to YAML 1.1, and texts `0x10` or `on`."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise yaml.YAMLError(f"a key is given twice among {', '.join(keys)}")
        for key, value in node.value:
            for entry in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                # Also in lists: the group 4.10 of heads is no number.
                if key.value in _TEXTS and entry.value != "null" and isinstance(entry, yaml.ScalarNode):
                    entry.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@functools.cache
def default_settings() -> dict[str, Any]:
    """Return the recipes by family under `defaults`, `window` and each of [`VARIANTS`], and sizes of models."""
    settings = _read_yaml(Path(__file__).with_name("defaults.yaml"))
    blocks = {name: family.recipe for name, family in RECOVERED.items()} | {name: name for name in TRANSFORMERS}
    return settings | {
        part: {name: settings[part][block] for name, block in blocks.items() if block in settings[part]}
        for part in ("defaults", "window", *VARIANTS)
    }


def default_recipe(family: str, variant: str | None = None, window: str | None = None) -> Recipe:
    """Return the recipe of a family.

    Args:
        family: One of [`FAMILIES`].
        variant: `paper` for the settings of arXiv 2601.07832, `fast` for ReLU, which is faster than the default
            and recovers less; `None` for the settings that measured best here.
        window: Softmax window beside MHLA; see [`MHLAConfig`].

    Raises:
        ValueError: If the variant has no settings for the family.
    """
    settings = default_settings()
    if variant is not None and family not in settings[variant]:
        raise ValueError(
            f"recipe {variant} has no setting for {models_of(family)}, only for {models_of(*settings[variant])}"
        )
    content = {} if variant not in (None, "fast") else settings["defaults"][family]
    if variant is not None:
        content = _merged(content, settings[variant][family])
    if window is not None:
        if variant in (None, "fast"):
            content = _merged(content, settings["window"].get(family, {}))
        content = _merged(content, {"mhla": {"window": window}})
    name = "default recipe" if variant is None else f"variant {variant}"
    return parse_recipe({"family": family, **content}, f"the {name} of {models_of(family)}")


def _merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge changes into the content of a recipe, key by key."""
    merged = dict(content)
    for name, value in changes.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def parse_recipe(content: Any, where: str) -> Recipe:
    """Check the content of a recipe.

    Args:
        content: Contents of the YAML file.
        where: Name in errors.

    Raises:
        ValueError: See [`load_recipe`].
    """
    with _errors_begin(f"{where}: "):
        if isinstance(content, Mapping):
            if {FORMER, "blockwise"} <= {*content}:
                raise ValueError(f"{FORMER} is the former name of blockwise; give one of them")
            content = {present_name(key, warn=True): value for key, value in content.items()}
        check_names("recipe", content, ("family", "layers", "mhla", *SECTIONS))
        values = {key: value for key, value in content.items() if value is not None}
        family = values.get("family")
        check_choice("family", family, FAMILIES)
        # To YAML, layers may also be a list of numbers or one number.
        layers = values.get("layers", "all")
        values["layers"] = ",".join(map(str, layers)) if isinstance(layers, list) else str(layers)
        if automatic_share(values["layers"]) is None:
            MHLAConfig(layers=values["layers"])
        values["mhla"] = _mhla_options(values.get("mhla", {}), str(family))
        sections = {key: _section(key, values.pop(key), str(family)) for key in SECTIONS if key in values}
        data: Any = sections.pop("data", DataOptions())
        recipe = Recipe(name=where, **values, data=data, stages=sections)
        for problem in _contradictions(recipe):
            raise ValueError(problem)
        return recipe


@contextmanager
def _errors_begin(prefix: str) -> Iterator[None]:
    """Put the path of a key, or the name of the recipe, before the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _section(name: str, content: Any, family: str | None) -> Options:
    fields = {item.name: item for item in dataclasses.fields(SECTIONS[name])}  # type: ignore[arg-type]
    check_names(name, content, fields)
    with _errors_begin(f"{name}."):
        made = SECTIONS[name](**content)
        for changed in made.changed():
            families = fields[changed].metadata.get("families", (family,))
            if family is not None and family not in families:
                raise ValueError(f"{changed} is not an option of {models_of(family)}, only of {models_of(*families)}")
    return made


def _mhla_options(options: Any, family: str) -> dict[str, Any]:
    check_names("mhla", options, [item.name for item in dataclasses.fields(MHLAConfig)])
    own: dict[str, Any] = {}
    refused = {"layers": "give layers at the top of the recipe instead"}
    if options.get("causal") != (family == "causal"):
        refused["causal"] = f"{models_of(family)} decide that themselves; leave it out"
    if family in TEXT:
        refused["blocks"] = "it has no meaning for sequences of text; give mhla.block_size"
        own = {"resize": "extend", "block_size": [64], "causal": family == "causal"}
    with _errors_begin("mhla."):
        for name, reason in refused.items():
            if options.get(name) is not None:
                raise ValueError(f"{name}: {reason}")
        MHLAConfig.from_dict({**own, **options})
    return dict(options)


def _contradictions(recipe: Recipe) -> Iterator[str]:
    """Problems between parts of a recipe that are valid by themselves."""
    # Converted, SANA-Video computes what it did, and there is no objective to fine-tune it by.
    if not recipe.stages and STAGES.keys() & default_settings()["defaults"][recipe.family].keys():
        yield f"it has no stage; give one of {', '.join(STAGES)}"
    if automatic_measure(recipe.layers) == "lookup" and recipe.family != "causal":
        yield f"by=lookup is for {models_of('causal')}, not for {models_of(recipe.family)}: choose layers by error"
    if "finetune" in recipe.stages and recipe.family in ("encoder", "vision"):
        yield f"finetune: {models_of(recipe.family)} have no objective to be fine-tuned by; use distill"
    if recipe.family == "vision" and (recipe.data.height is None) != (recipe.data.width is None):
        yield "data.height and data.width: give both"
    for name, options in recipe.stages.items():
        if STAGES[name].needs_objective and recipe.family in WITHOUT_OBJECTIVE:
            yield f"{name}: {models_of(recipe.family)} have no objective yet; use calibrate and match"
        if STAGES[name].part == "layer" and options.batch_size > recipe.data.samples:
            yield f"{name}.batch_size must be at most data.samples, {recipe.data.samples}, got {options.batch_size}"
