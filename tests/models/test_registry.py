# SPDX-License-Identifier: Apache-2.0
"""The registry knows every fact about a family, and what is written elsewhere agrees with it."""

import inspect

import mhla_hf
from mhla_hf.cli.recover import TRAINING
from mhla_hf.models.registry import FAMILIES, RECOVERED, TRAINED, names_of
from mhla_hf.recovery import recipes
from mhla_hf.recovery.data import data_or_default
from mhla_hf.training import config
from tests import ROOT


def test_lists_of_families_follow_from_the_facts():
    video = {"wan", "sana-video", "wan-vace", "ltx", "ltx2", "hunyuan-video", "hunyuan-video-1.5"}
    images = {"dit", "pixart", "sana", "qwen-image", "flux", "chroma"}
    trained = {"wan", "wan-vace", "ltx", "hunyuan-video", "sana", "flux", "dit"}
    # Families that were added since are tested where they are.
    assert set(recipes.VIDEO) >= video and set(recipes.IMAGES) >= images
    assert set(recipes.VIDEO + recipes.IMAGES) == set(RECOVERED)
    needing_data = {"wan", "dit", "sana", "sana-video"}
    assert set(RECOVERED) - set(recipes.DATA_FREE) == needing_data
    assert set(TRAINED) == set(TRAINING) - {"cache"} == trained
    assert set(recipes.WITHOUT_OBJECTIVE) == set(RECOVERED) - trained
    assert set(names_of(FAMILIES, recipe="")) == {"WanAnimateTransformer3DModel"}
    assert [family.training for family in FAMILIES.values() if family.name not in RECOVERED] == ["wan-animate", "wan"]
    calls = {name: RECOVERED[name].call_samples for name in sorted(video | images)}
    assert {name: count for name, count in calls.items() if count != 1} == {"ltx": 2, "ltx2": 1.5, "pixart": 2}


def test_options_of_training_follow_from_the_facts():
    text = {"wan", "wan-vace", "ltx", "sana", "hunyuan-video", "flux"}
    expected = {
        "component": {"wan", "wan-vace"},
        "validation_negative_prompt": {"wan", "wan-vace", "ltx", "sana"},
        "fps": {"wan", "wan-vace", "ltx", "hunyuan-video"},
        **dict.fromkeys(("flow_shift", "logit_mean", "logit_std", "max_sequence_length", "prompts"), text),
    }
    assert {name: set(config.option_families(name)) for name in expected} == expected
    lengths = {"wan": 512, "wan-vace": 512, "ltx": 128, "hunyuan-video": 256, "sana": 300, "flux": 512, "dit": 0}
    assert {name: family.text_tokens for name, family in TRAINED.items()} == lengths
    for name, family in TRAINED.items():
        objective = family.load_objective()
        assert objective.name == name
        assert any(each.startswith("negative") for each in objective.encoded_names) == family.negative_prompts
        assert ("flow matching" in family.trained_by) == bool(family.text_tokens)


def test_models_that_make_their_own_data():
    made = {}
    for has_prompts in (False, True):
        for name in recipes.FAMILIES:
            try:
                made[name, has_prompts] = data_or_default(None, name, has_prompts)
            except ValueError:
                made[name, has_prompts] = "refused"
    generated = {("dit", False), ("dit", True), ("causal", False), ("causal", True), ("wan", True), ("sana", True)}
    assert {key for key, data in made.items() if data == "generated"} == generated
    assert {name for (name, _), data in made.items() if data is None} == set(recipes.DATA_FREE)


def test_recipes_by_block():
    """Families of one block have one recipe; blocks that no family names would be dead."""
    named = {family.recipe for family in RECOVERED.values()} | set(recipes.TRANSFORMERS)
    stored = recipes._read_yaml(ROOT / "mhla_hf" / "recovery" / "defaults.yaml")
    assert set(stored["defaults"]) == named
    assert all(set(stored[part]) <= named for part in ("window", *recipes.VARIANTS))
    for block in ("video", "joint"):
        made = [recipes.default_recipe(name).changed({"family": "flux"}) for name in names_of(RECOVERED, recipe=block)]
        assert len(made) > 1 and all(recipe == made[0] for recipe in made)


def test_public_names_are_those_of_the_registry():
    """Type checkers read imports as text, which list the classes once more."""
    for family in FAMILIES.values():
        line = f"    from .families.{family.module} import {family.mhla_class} as {family.mhla_class}\n"
        assert line in inspect.getsource(mhla_hf)


def test_the_table_of_supported_models():
    """What the page says of recovery and training is what the registry knows."""
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    cells = {row[0]: row[1:4] for row in rows if len(row) == 8}
    for family in FAMILIES.values():
        own = RECOVERED.get(family.training)
        recover = "✓" if own else "⁶"
        if own and not own.objective:
            recover += " ¹" if own.data_free else " ³"
        recover += " ²" * (family.name == "sana")
        train = "✓" if family.training in TRAINED else "–"
        # Some families have more than one row: the one of their title, or of text to video, tells what is there.
        title = next(title for title in cells if title.split(" (")[0].removesuffix(", text to video") == family.title)
        assert cells[title] == ["✓", recover, train], title
