# SPDX-License-Identifier: Apache-2.0
"""Models that are pretrained to be recovered, what their recoveries are worth, and the tables of the results."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from PIL import Image

from benchmarks import minilm, pretrained
from benchmarks.recovery import COSINE, LINEAR, PREPARED, Case, downstream_means, plot, points, run_case, summary


QUICK = {
    "budget": 0.002,
    "stages": ["match"],
    "changes": {"match.batches": 2, "data.samples": 16, "data.held_out": 4},
}
RESULTS = {
    f"{model}/{variant}/{seed}": {
        "figures": {
            "softmax": {},
            "converted": {figure: 0.5},
            "match": {figure: 0.75},
            "blockwise": {figure: 0.875 + seed / 16},
        },
        "seconds": {
            "converted": {"cpu_seconds": 1.0},
            "match": {"cpu_seconds": 2.0},
            "blockwise": {"cpu_seconds": 3.0},
        },
        "downstream": {"other text": {"spearman": 0.5 + seed / 4}},
    }
    for model, figure in (("minilm", "cosine"), ("dit", "above_softmax_percent"))
    for variant in ("mhla", "window")
    for seed in (0, 1)
}


def tiny(maker, **options):
    return partial(maker, steps=2, layers=1, width=16, batch_size=2, **options)


@pytest.fixture
def makers(monkeypatch):
    monkeypatch.setitem(pretrained.MODELS, "dit", tiny(pretrained.make_dit, vae_steps=1, samples=20))
    monkeypatch.setitem(pretrained.MODELS, "vit", tiny(pretrained.make_vit, images=20))
    monkeypatch.setattr(pretrained, "_VIT_COPIES", 1)


def test_training_resumes_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "CHECKPOINT_EVERY", 1)

    def run(name, stop=None):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)

        def loss(step):
            if step == stop:
                raise KeyboardInterrupt
            return model(torch.randn(2, 3, generator=torch.Generator().manual_seed(step))).square().mean()

        pretrained.train(model, loss, tmp_path / name, steps=4, other_rate=1e-2)
        return model.weight

    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop=2)
    torch.testing.assert_close(run("stopped"), run("whole"), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), [("dit", "linear"), ("vit", "window")])
def test_pretrained_models_are_recovered(tmp_path, makers, name, variant):
    source = pretrained.pretrain(name, tmp_path)
    record = (source / pretrained.RECORD).stat().st_mtime_ns
    assert pretrained.pretrain(name, tmp_path) == source
    assert (source / pretrained.RECORD).stat().st_mtime_ns == record
    (tmp_path / "case").mkdir()
    result = run_case(Case(name, variant, 0), tmp_path / "case", source, **QUICK)
    assert len(points(result)) == 2
    assert ("downstream" in result) is (name == "vit")


def test_prose_is_that_of_packages(tmp_path):
    licence = "Permission is hereby granted to any person who obtains a copy of this software."
    package = tmp_path / "thing-1.0.dist-info"
    (package / "licenses").mkdir(parents=True)
    (package / "licenses" / "LICENSE").write_text(f"{licence}\n\n{licence}\n\nshort")
    (package / "METADATA").write_text(
        "Name: thing\nSummary: not a body\n\nA package that makes\nthings for those who want many."
    )
    (tmp_path / "notes.md").write_text("a = 1, b = 2, c = 3, d = 4, e = 5, f = 6")
    assert minilm.prose(tmp_path) == ["A package that makes things for those who want many.", licence]


def test_embeddings_are_compared_by_similarity_and_neighbours():
    rows = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    same = minilm.compare(rows, -rows, pairs=20)
    assert same == {"spearman": pytest.approx(1), "recall": 1}
    other = minilm.compare(rows, rows.flip(0), pairs=20)
    assert abs(other["spearman"]) < 0.8 and 0.1 < other["recall"] < 0.5


def test_means_and_plot_take_whatever_stages_there_are(tmp_path):
    row = summary(RESULTS)["minilm"]["mhla"]
    assert row["blockwise"] == pytest.approx(0.90625) and row["cpu_seconds"] == 5 and "distill" not in row
    assert downstream_means(RESULTS)["minilm", "mhla", "other text"] == {"spearman": 0.625}
    plot(RESULTS, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width > image.height


def test_prepared_models_are_known():
    assert set(PREPARED) == set(pretrained.MODELS) == set(LINEAR) and set(COSINE) < set(PREPARED)
