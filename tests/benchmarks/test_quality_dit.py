# SPDX-License-Identifier: Apache-2.0
"""The comparison of small DiTs: its parts, and the whole at a size of seconds."""

import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from benchmarks.quality_dit import SETTINGS, VARIANTS, QualityOptions
from benchmarks.quality_dit.data import NUM_CLASSES, held_out_batches, load_digits, training_batch
from benchmarks.quality_dit.fidelity import (
    FeatureStatistics,
    accuracy,
    feature_statistics,
    frechet_distance,
    nearest_distance,
    train_classifier,
)
from benchmarks.quality_dit.models import make_model
from benchmarks.quality_dit.report import METRICS, curve, summarize
from benchmarks.quality_dit.runner import measure_quality, write_measurement
from benchmarks.quality_dit.training import held_out_losses, sample, train
from mhla_hf.cli.main import app
from mhla_hf.training.stages.flow_matching import add_noise, unshift_sigmas


SMOKE = SETTINGS["smoke"]


@pytest.fixture(scope="module")
def digits():
    return load_digits("train", SMOKE.image_size)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A finished run of the smallest setting: where its trainings are, and its measurement."""
    directory = tmp_path_factory.mktemp("work")
    return directory, measure_quality(SMOKE, directory, setting="smoke", device="cpu")


def test_every_variant_starts_from_the_same_weights():
    models = {variant: make_model(SMOKE, variant, seed=3) for variant in VARIANTS}
    shared = models["softmax"].state_dict()
    for variant, model in models.items():
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in shared.items())
        added = {name.partition(".mhla.")[2] for name in set(state) - set(shared)}
        expected = {
            "softmax": set(),
            "linear": {"mixing"},
            "mhla": {"mixing"},
            "mhla_cpe_gate": {"mixing", "gate.weight", "gate.bias", "lepe.weight", "lepe.bias"},
        }
        assert added == expected[variant]
    assert tuple(models["linear"].transformer_blocks[0].attn1.mhla.mixing.shape) == (1, 1)
    assert tuple(models["mhla"].transformer_blocks[0].attn1.mhla.mixing.shape) == (4, 4)
    other = make_model(SMOKE, "softmax", seed=4).state_dict()
    assert not torch.equal(other["pos_embed.proj.weight"], shared["pos_embed.proj.weight"])


def test_a_fresh_model_predicts_nothing_as_dit_does(digits):
    model = make_model(SMOKE, "mhla", seed=0).eval()
    losses = held_out_losses(model, digits, SMOKE)
    # All of noise - image is left: the noise has a variance of 1.
    expected = 1 + digits.images.square().mean().item()
    assert losses["held_out_loss"] == pytest.approx(expected, abs=0.01)
    assert losses["held_out_loss_by_quarter"] == pytest.approx([expected] * 4, abs=0.04)


@pytest.mark.parametrize("setting", ["small", "large"])
def test_models_have_at_most_ten_million_parameters_and_grids_of_sixteen_tokens(setting):
    options = SETTINGS[setting]
    assert options.tokens_per_side >= 16
    assert len(options.seeds) >= 3
    assert sum(value.numel() for value in make_model(options, "mhla_cpe_gate", 0).parameters()) <= 10_000_000


def test_splits_are_disjoint_and_lie_between_black_and_white(digits):
    held_out = load_digits("held_out", SMOKE.image_size)
    assert (len(digits), len(held_out)) == (1498, 299)
    assert digits.images.min() == -1
    assert digits.images.max() == 1
    seen = {image.numpy().tobytes() for image in digits.images}
    assert not seen & {image.numpy().tobytes() for image in held_out.images}


def test_batches_follow_from_seed_and_step(digits):
    options = replace(SMOKE, batch_size=500, class_dropout=0.25)
    first = training_batch(digits, options, 0, 7)
    again = training_batch(digits, options, 0, 7)
    assert torch.equal(first.noisy, again.noisy)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.noisy, training_batch(digits, options, 0, 8).noisy)
    assert not torch.equal(first.sigmas, training_batch(digits, options, 1, 7).sigmas)
    assert (first.labels == NUM_CLASSES).float().mean().item() == pytest.approx(0.25, abs=0.06)
    assert unshift_sigmas(first.sigmas, options.flow_shift).mean().item() == pytest.approx(0.5, abs=0.05)
    assert first.noise.std().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(add_noise(first.clean, first.noise, first.sigmas), first.noisy)


def test_held_out_noise_levels_are_spread_evenly(digits):
    options = replace(SMOKE, held_out_draws=2)
    batches = list(held_out_batches(digits, options))
    levels = unshift_sigmas(torch.cat([batch.sigmas for batch in batches]), options.flow_shift)
    assert len(levels) == 2 * len(digits)
    assert torch.allclose(levels.sort().values, (torch.arange(len(levels)) + 0.5) / len(levels), atol=1e-4)
    assert all((batch.labels < NUM_CLASSES).all() for batch in batches)


def test_training_lowers_the_loss_and_repeats_itself(digits):
    options = replace(SMOKE, steps=40, batch_size=16, learning_rate=1e-2)
    runs = [train(make_model(options, "mhla", 0), digits, options, 0, lambda _: None) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 40
    assert sum(runs[0][-5:]) < 0.8 * sum(runs[0][:5])


def test_a_diverged_training_is_an_error(digits):
    model = make_model(SMOKE, "softmax", 0)
    with torch.no_grad():
        model.proj_out_2.bias.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="seed 5 is no longer finite"):
        train(model, digits, SMOKE, 5, lambda _: None)


def test_samples_start_from_the_same_noise_and_guidance_changes_them(digits):
    options = replace(SMOKE, steps=10, learning_rate=1e-2)
    model = make_model(options, "linear", 0)
    train(model, digits, options, 0, lambda _: None)
    labels = torch.arange(4)
    plain = sample(model, labels, options)
    assert plain.shape == (4, 1, 16, 16)
    assert plain.abs().max() <= 1
    assert torch.equal(plain, sample(model, labels, options))
    assert not torch.equal(plain, sample(model, labels, options, guidance_scale=3.0))
    assert not torch.equal(plain, sample(model, labels, options, name="other"))


def test_the_frechet_distance_is_that_of_two_normal_distributions():
    generator = torch.Generator().manual_seed(0)

    def statistics(shift: float) -> FeatureStatistics:
        factor = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        return FeatureStatistics(torch.full((4,), shift, dtype=torch.float64), factor @ factor.T)

    first, second = statistics(0.0), statistics(0.5)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)
    # The matrix root by the definition: C1 C2 = V D V⁻¹.
    values = torch.linalg.eigvals(first.covariance @ second.covariance).real.sqrt()
    trace = (first.covariance + second.covariance).trace() - 2 * values.sum()
    expected = (1.0 + trace) / second.covariance.trace()
    assert frechet_distance(first, second) == pytest.approx(expected.item())
    alike = FeatureStatistics(second.mean, torch.zeros(4, 4, dtype=torch.float64))
    assert frechet_distance(alike, second) == pytest.approx(1.0)


def test_the_classifier_knows_digits_and_its_features_tell_them_from_noise(digits):
    classifier = train_classifier(digits)
    held_out = load_digits("held_out", SMOKE.image_size)
    assert accuracy(classifier, held_out.images, held_out.labels) > 0.93
    real = feature_statistics(classifier, digits.images)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(held_out.images.shape, generator=generator) * 2 - 1
    floor = frechet_distance(feature_statistics(classifier, held_out.images), real)
    assert 0 < floor < 0.1
    assert frechet_distance(feature_statistics(classifier, noise), real) > 10 * floor


def test_copies_are_nearest_to_the_scans_that_they_are_of(digits):
    assert nearest_distance(digits.images[:20], digits.images) == pytest.approx(0, abs=1e-2)
    held_out = load_digits("held_out", SMOKE.image_size).images
    noise = torch.rand(held_out.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert 1 < nearest_distance(held_out, digits.images) < 0.6 * nearest_distance(noise, digits.images)


def test_curves_are_means_of_windows():
    assert curve([4.0, 2.0]) == {"step": [1, 2], "loss": [4.0, 2.0]}
    long = curve([float(number) for number in range(120)])
    assert long["step"][:2] == [3, 6]
    assert long["step"][-1] == 120
    assert long["loss"][:2] == [1.0, 4.0]


def test_differences_are_taken_within_seeds():
    runs = [
        {"variant": variant, "seed": seed, **dict.fromkeys(METRICS, offset + 10.0 * seed)}
        for offset, variant in enumerate(VARIANTS)
        for seed in (1, 0)
    ]
    report = summarize(runs)
    assert report["summary"]["softmax"]["held_out_loss"] == {"mean": 5.0, "standard_deviation": pytest.approx(50**0.5)}
    assert set(report["differences"]["softmax"]) == {"linear"}
    assert report["differences"]["mhla"]["softmax"]["held_out_loss"] == {"mean": 2.0, "standard_error": 0.0}
    assert report["differences"]["mhla"]["linear"]["frechet_distance"] == {"mean": 1.0, "standard_error": 0.0}
    alone = summarize([run for run in runs if run["seed"] == 0])
    assert alone["differences"]["mhla"]["linear"]["class_accuracy"] == {"mean": 1.0, "standard_error": None}


def test_the_report_has_every_run_and_can_be_written(work, tmp_path):
    measurement = work[1]
    report = measurement.report
    assert [(run["variant"], run["seed"]) for run in report["runs"]] == [
        (variant, seed) for seed in SMOKE.seeds for variant in VARIANTS
    ]
    assert all(math.isfinite(run[metric]) for run in report["runs"] for metric in METRICS)
    assert report["machine"]["date"]
    assert report["classifier"]["held_out_accuracy"] > 0.9
    paths = write_measurement(measurement, tmp_path / "new", "quality")
    assert [path.name for path in paths] == ["quality.json", "quality.png", "quality_samples.png"]
    assert json.loads(paths[0].read_text()) == json.loads(json.dumps(report))
    for path in paths[1:]:
        with Image.open(path) as image:
            assert min(image.size) > 200
    assert set(measurement.samples) == {"digits", *VARIANTS}
    assert all(images.shape == (2 * NUM_CLASSES, 1, 16, 16) for images in measurement.samples.values())


def test_a_stopped_run_goes_on_and_other_options_are_refused(work):
    directory, measurement = work
    before = {path: path.stat().st_mtime_ns for path in directory.glob("*/result.json")}
    assert len(before) == 8
    redone = directory / "mhla-1"
    for path in redone.iterdir():
        path.unlink()
    redone.rmdir()
    again = measure_quality(SMOKE, directory, device="cpu")
    for old, new in zip(measurement.report["runs"], again.report["runs"]):
        times = {"training_seconds": 0, "training_cpu_seconds": 0}
        assert {**old, **times} == {**new, **times}
    unchanged = [path for path, time in before.items() if path.stat().st_mtime_ns == time]
    assert len(unchanged) == 7
    with pytest.raises(ValueError, match="another steps"):
        measure_quality(replace(SMOKE, steps=3), directory, device="cpu")
    with pytest.raises(ValueError, match="jobs=0"):
        measure_quality(SMOKE, directory, device="cpu", jobs=0)


def test_processes_give_the_same_figures(work, tmp_path):
    options = replace(SMOKE, seeds=(0,))
    again = measure_quality(options, tmp_path, device="cpu", jobs=2)
    for old, new in zip(work[1].report["runs"], again.report["runs"]):
        assert (old["variant"], old["seed"]) == (new["variant"], new["seed"])
        assert [new[metric] for metric in METRICS] == pytest.approx([old[metric] for metric in METRICS], rel=1e-3)


def test_the_command_writes_a_table_and_three_files(work, tmp_path):
    result = CliRunner().invoke(
        app,
        ["bench", "quality", "--setting", "smoke", "--work", str(work[0]), "--output", str(tmp_path), "--quiet"],
    )
    assert result.exit_code == 0, result.output
    assert "mhla_cpe_gate" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "quality_dit_smoke.json",
        "quality_dit_smoke.png",
        "quality_dit_smoke_samples.png",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--setting", "huge"], "small, large, smoke"),
        (["--setting", "smoke", "--seeds", "a"], "seeds='a'"),
        (["--setting", "smoke", "--steps", "0"], "steps=0"),
        (["--threads", "0"], "threads=0"),
    ],
    ids=["setting", "seeds", "steps", "threads"],
)
def test_mistakes_on_the_command_line_are_told_before_any_work(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "quality", *options])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image_size": 33}, "image_size=33 must be a multiple of patch_size=2"),
        ({"hidden_size": 30}, "hidden_size=30 must be heads=4 times an even number"),
        ({"blocks": 17}, "blocks=17 must be at most 16"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"flow_shift": 0.0}, "flow_shift"),
        ({"class_dropout": 0.0}, "class_dropout"),
        ({"guidance_scale": 0.5}, "guidance_scale"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"dtype": "float16"}, "float32, bfloat16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        QualityOptions(**changes)


def test_unknown_variants_are_refused():
    with pytest.raises(ValueError, match="softmax, linear, mhla, mhla_cpe_gate"):
        SMOKE.mhla("mamba")
