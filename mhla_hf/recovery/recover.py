# SPDX-License-Identifier: Apache-2.0
"""`recover`: convert, calibrate, match and distill a model in one resumable run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import automatic_share
from ..conversion.convert import plan_model
from ..conversion.planning import PlanOptions
from ..models.directory import ModelDirectory
from ..models.registry import family_for
from ..models.source import Component, Source, open_source
from ..models.weight_files import check_weights
from ..training.config import DIGITS, TrainingConfig
from ..training.processes import TrainingStopped
from ..utils.locations import is_hub_id
from ..utils.machine import choose_device, parse_dtype
from ..utils.messages import check_count, shorten_list, shorten_text
from .data import DATA_FREE, GENERATED, RecoveryData
from .recipes import VARIANTS, default_recipe, load_recipe, parse_keep
from .report import RecoveryReport
from .run import MakeSource, RecoveryRun
from .work_folder import CONVERTED, DATA, WorkFolder


_SAVE_EVERY = 100
_TEXTS = "a folder of .txt, .md, .rst or .py files, a .jsonl file, or the id of a data set"
_IMAGES = "a folder of images with captions, 'digits', or prompts (--prompts FILE) for the original to make"
_DATA = {
    "causal": _TEXTS,
    "encoder": _TEXTS,
    "vision": "a folder of images, or 'digits'",
    "wan": "a folder of videos with captions, 'digits', or prompts (--prompts FILE) for the original to make",
}


def recover(
    source: str | Path,
    output: str | Path,
    data: str | Path | MakeSource | None = None,
    *,
    prompts: str | Path | None = None,
    recipe: str | Path | None = None,
    layers: str | None = None,
    keep: str | None = None,
    window: str | None = None,
    blocks: Sequence[int] | None = None,
    block_size: Sequence[int] | None = None,
    dtype: str | torch.dtype | None = None,
    budget: float | None = None,
    stages: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    component: str | None = None,
    resume: bool = False,
    seed: int = 0,
    device: str = "auto",
    save_every: int = _SAVE_EVERY,
    progress: bool = True,
    on_stage: Callable[[str], None] | None = None,
    **hub: Any,
) -> RecoveryReport:
    """Convert a model to MHLA and recover the quality of the original: calibration, matching, distillation.

    Options, recipe and data are checked before anything is written. Each stage saves its result in `output/work`, so
    a killed run resumes with `resume=True`. A run with other options replaces one that has neither finished a stage
    nor saved a checkpoint. When all stages are done, `output` is a directory for `from_pretrained`, with
    `conversion.json`, `report.json` and a plot.

    Args:
        source: A pipeline of diffusers or a model of transformers; a directory or a Hub id.
        output: The directory to make.
        data: For diffusion models a folder of videos or images with captions or classes, as for `mhla-hf train`; for
            text a folder of .txt, .md, .rst and .py files, a JSONL file or the id of a data set; for vision models a
            folder of images; `digits` where scikit-learn's scans will do; `generated` for samples that the original
            makes. `None` is `generated` for DiT, PixArt and language models, and for others with `prompts`. In a
            program also a function from the converted model to a
            [`BatchSource`][mhla_hf.training.data.batches.BatchSource].
        prompts: Text file with one prompt per line, for samples of the original; unused if `data` is a function.
        recipe: A YAML file, or the name of a recipe that comes with the package; `fast` is the default with ReLU,
            which is faster and recovers less, `paper` has the settings of arXiv 2601.07832. `None` takes the default
            of the model's family.
        layers: Which layers become MHLA, in place of the recipe's.
        keep: Share of the layers that stay softmax, such as `25%`, those that are worst to replace; in place of
            `layers`.
        window: Softmax window beside MHLA: `block`, `adjacent` or `cross`.
        blocks: Number of blocks along each axis, in place of the recipe's.
        block_size: Tokens of a block along each axis instead.
        dtype: Type that the weights are cast to when the model is converted: float32, bfloat16 or float16. By default
            they keep theirs; training is in float32 either way.
        budget: That many times the steps of the recipe in every stage.
        stages: Only these stages of `calibrate`, `match`, `distill` and `finetune`.
        changes: Values of the recipe by their path, such as `{"match.steps": 1000}`.
        component: Which transformer of a pipeline; the others are copied.
        resume: Resume the run in `output`.
        seed: Of everything random.
        device: `cpu`, `cuda`, one of several GPUs such as `cuda:1`, or `auto`: a GPU if there is one.
        save_every: Steps between checkpoints.
        progress: Show progress.
        on_stage: Called with the name of each stage when it begins.
        **hub: `revision`, `token`, `cache_dir` and `local_files_only` for sources on the Hub.

    Returns:
        The figures, stage by stage.

    Raises:
        ValueError: If an option, the recipe, the data or the source is wrong, or `output` holds another run.
        FloatingPointError: If a loss is no longer finite; the message names step, batch and last good checkpoint.
        TrainingStopped: After Ctrl-C or SIGTERM; what was done is kept.
    """
    place = choose_device(device)
    # As the stages take them.
    TrainingConfig(seed=seed)
    check_count("save_every", save_every)
    cast = parse_dtype(dtype)
    variant = str(recipe) if recipe in VARIANTS else None
    given = load_recipe(recipe) if recipe is not None and variant is None else None
    opened, part, family = find_model(source, component, **hub)
    if given is not None and given.family != family:
        raise ValueError(
            f"{given.name} is for models of the family {given.family}, and {opened.location} is of {family}"
        )
    if layers is not None and keep is not None:
        raise ValueError("layers and keep are both given; give one of them")
    own: dict[str, Any] = {
        "layers": layers if keep is None else parse_keep(keep),
        "mhla.window": None if given is None else window,
    }
    own = {name: value for name, value in own.items() if value is not None}
    for name, other, value in (("blocks", "block_size", blocks), ("block_size", "blocks", block_size)):
        if value is not None:
            own = {f"mhla.{other}": None, **own, f"mhla.{name}": value}
    chosen = (given or default_recipe(family, variant, window)).changed({**own, **(changes or {})})
    if stages is not None:
        chosen = chosen.only(tuple(stages))
    if budget is not None:
        chosen = chosen.with_budget(budget)
    share = automatic_share(chosen.layers)
    learns = bool(chosen.stages()) or share is not None
    if not learns and (data is not None or prompts is not None):
        raise ValueError("data and prompts have no effect: the recipe has no stage, and its layers are named")
    can_generate = family in ("dit", "causal") or (prompts is not None and family in ("wan", "sana"))
    needs_data = learns and family not in DATA_FREE
    if data == "" or (data is None and needs_data and not can_generate):
        raise ValueError(f"data must be given: {_DATA.get(family, _IMAGES)}")
    if data is None and needs_data:
        data = GENERATED
    work = WorkFolder(Path(output).expanduser())
    open_source: MakeSource | None = data if callable(data) else None
    named = None if data is None or callable(data) else str(data)
    identity = {
        "source": str(Path(source).resolve()) if Path(source).is_dir() else str(source),
        "component": part.name,
        # Samples that a program makes are told from others by their fingerprint alone.
        "data": named,
        "prompts": None if prompts is None else str(prompts),
        "seed": seed,
        "dtype": None if cast is None else str(cast).removeprefix("torch."),
        "recipe": {**chosen.to_dict(), "description": None, "expected": None, "model": None},
    }
    is_converted = work.is_run_of(identity) and (work.is_done(CONVERTED) or work.has_result)
    if not is_converted:
        plan_model(
            ModelDirectory.read(opened.root, part.name),
            chosen.mhla,
            PlanOptions(layers="all" if share is not None else chosen.layers, dtype=cast),
        )
    if learns and open_source is None:
        given_data = RecoveryData(
            root=opened.root,
            component=part,
            recipe=chosen,
            data=named,
            converted=work.path / CONVERTED,
            prompts=None if prompts is None else str(prompts),
            cache=work.path / DATA,
            seed=seed,
            progress=progress,
        )
        if not is_converted:
            given_data.check()
        open_source = given_data.open
    with work.claimed(identity, resume):
        run = RecoveryRun(opened, part, work, chosen, seed, place, save_every, progress, hub, on_stage, cast)
        try:
            return run.run(open_source, _origin(named))
        except TrainingStopped as stop:
            done = shorten_text(str(stop).partition(";")[0], 200) or "stopped"
            raise TrainingStopped(
                f"{done}; the same command with --resume continues from there ({work.output})", stop.exit_code - 128
            ) from None


def _origin(data: str | None) -> dict[str, str]:
    """Return the part of the data's origin that may be published: ids and names, never a user's paths."""
    if data is None or Path(data).expanduser().exists():
        return {}
    known = data in (GENERATED, DIGITS) or is_hub_id(data.partition(":")[0])
    return {"origin": data} if known else {}


def find_model(location: str | Path, component: str | None = None, **hub: Any) -> tuple[Source, Component, str]:
    """Find the model to recover, without loading weights.

    Args:
        location: A pipeline of diffusers or a model of transformers, directory or Hub id.
        component: Which transformer of a pipeline; `transformer` by default.
        **hub: Options of [`open_source`][mhla_hf.models.source.open_source].

    Returns:
        The directory, the model in it, and its family; see `recipes.FAMILIES`.

    Raises:
        ValueError: If it is no such thing, has no version with MHLA, is MHLA already, or of a kind that takes its
            inputs from several places.
    """
    source = open_source(location, **hub)
    part = source.component(component)
    if not part.is_transformers and (part.is_mhla or source.pipeline is None):
        problem = "is a transformer alone; give the pipeline that it belongs to"
        if part.is_mhla:
            problem = "is MHLA already; recover from the model that it was converted from"
        raise ValueError(f"{location} {problem}")
    check_weights(part.folder)
    family = _transformers_family(part) if part.is_transformers else family_for(part.class_name).name
    return source, part, family


def _transformers_family(component: Component) -> str:
    """`causal`, `encoder` or `vision`, from the options that the model would have."""
    from ..conversion.transformers_planning import plan_transformers_model

    options = plan_transformers_model(ModelDirectory.read(component.folder), None, PlanOptions()).report.mhla
    if "causal" not in options:
        raise ValueError(
            f"{component.folder} has several towers ({shorten_list(options)}); recover them in Python, with "
            "mhla_hf.calibrate and mhla_hf.recovery.match_layers"
        )
    grid = options.get("grid")
    if grid is not None and len(grid) == 2:
        return "vision"
    return "causal" if options["causal"] else "encoder"
