# SPDX-License-Identifier: Apache-2.0
"""The comparison of small DiTs: its parts, and the whole at a size of seconds."""

import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image

from benchmarks.quality_dit import SETTINGS, VARIANTS
from benchmarks.quality_dit.data import NUM_CLASSES, load_digits, training_batch
from benchmarks.quality_dit.fidelity import (
    FeatureStatistics,
    frechet_distance,
)
from benchmarks.quality_dit.models import make_model
from benchmarks.quality_dit.report import METRICS
from benchmarks.quality_dit.runner import measure_quality, write_measurement
from benchmarks.quality_dit.training import train
from mhla_hf.families.objectives import add_noise, unshift_sigmas


pytestmark = pytest.mark.slow


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


def test_training_lowers_the_loss_and_repeats_itself(digits):
    options = replace(SMOKE, steps=40, batch_size=16, learning_rate=1e-2)
    runs = [train(make_model(options, "mhla", 0), digits, options, 0, lambda _: None) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(runs[0]) == 40
    assert sum(runs[0][-5:]) < 0.8 * sum(runs[0][:5])


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
    with pytest.raises(ValueError, match=r"steps \d+ \(now 3\)"):
        measure_quality(replace(SMOKE, steps=3), directory, device="cpu")
    with pytest.raises(ValueError, match="jobs=0"):
        measure_quality(SMOKE, directory, device="cpu", jobs=0)
