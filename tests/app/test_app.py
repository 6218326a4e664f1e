# SPDX-License-Identifier: Apache-2.0
"""The application without a browser: what it opens, what it answers, and what it keeps to itself."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests import ROOT, forget_path, tiny, tiny_images

from .conftest import running


gradio = pytest.importorskip("gradio", reason="gradio is not installed")
gradio_client = pytest.importorskip("gradio_client", reason="gradio is not installed")
app = pytest.importorskip("mhla_hf.app")

VIDEO = {
    "prompt": "a cat", "num_inference_steps": 2, "seed": 3, "guidance_scale": 2.0, "height": 32, "width": 64,
    "num_frames": 9,
}  # fmt: skip
"""A small request of the tiny pipeline."""


@pytest.fixture(scope="module")
def comparison(saved_pipeline):
    return app.open_comparison(saved_pipeline.model, device="cpu")


@pytest.fixture(scope="module")
def server(saved_pipeline):
    with running(saved_pipeline) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return gradio_client.Client(server.url, verbose=False, analytics_enabled=False)


def converted(pipeline, folder: Path) -> Path:
    from mhla_hf import convert_pretrained

    pipeline.save_pretrained(folder / "original")
    convert_pretrained(folder / "original", folder / "mhla", progress=False)
    return folder / "mhla"


def test_pipelines_share_all_but_denoisers_and_schedulers(comparison):
    assert (comparison.name, comparison.location, comparison.kind) == ("tiny-mhla", "tiny-wan", "video")
    original, mhla = comparison.sides["original"], comparison.sides["mhla"]
    assert type(original.transformer).__name__ == "WanTransformer3DModel"
    assert type(mhla.transformer).__name__ == "MHLAWanTransformer3DModel"
    assert original.vae is mhla.vae and original.text_encoder is mhla.text_encoder
    assert original.scheduler is not mhla.scheduler


def test_sliders_are_bounded_by_the_models_own_size(comparison):
    inputs = app.request_inputs(comparison)
    assert list(inputs) == list(VIDEO)
    bounds = {name: (inputs[name].value, inputs[name].maximum) for name in ("height", "width", "num_frames")}
    assert bounds == {"height": (32, 256), "width": (64, 256), "num_frames": (9, 33)}


PIPELINES = {
    "dit": (tiny_images.dit_pipeline, "image", {"class_labels": 7}),
    "sana": (tiny_images.sana_pipeline, "image", {"prompt": "a cat", "height": 64, "width": 96}),
    "two experts": (
        lambda: tiny.wan_pipeline(second_transformer=True),
        "video",
        {"prompt": "a cat", "height": 32, "width": 48, "num_frames": 5},
    ),
}

TOKENS = {"dit": 16, "sana": 6, "two experts": 12}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_kind_of_pipeline_answers(name, tmp_path):
    make, kind, request = PIPELINES[name]
    comparison = app.open_comparison(converted(make(), tmp_path), device="cpu")
    assert comparison.kind == kind
    assert comparison.attention == ("linear attention" if name == "sana" else "softmax attention")
    request = {"num_inference_steps": 3, "seed": 1, "guidance_scale": 2.0, **request}
    assert set(app.request_inputs(comparison)) == set(request)
    original, mhla = (app.generate(comparison, side, request, threading.Event()) for side in comparison.sides)
    for pixels, seconds, tokens in (original, mhla):
        assert pixels.dtype == np.uint8 and pixels.ndim == (4 if kind == "video" else 3)
        assert seconds > 0 and tokens == TOKENS[name]
    assert original[0].shape == mhla[0].shape
    # Nothing is claimed of models whose attention was linear before.
    assert ("becomes faster" in app.describe_times(comparison, original, mhla)) == (name != "sana")
    # SANA is linear already: its conversion changes nothing before training.
    assert (original[0] == mhla[0]).all() == (name == "sana")
    if name == "two experts":
        assert comparison.sides["original"].config.boundary_ratio == comparison.sides["mhla"].config.boundary_ratio
        assert type(comparison.sides["original"].transformer_2).__name__ == "WanTransformer3DModel"


def test_images_appear_one_after_the_other(tmp_path):
    page = app.build_page(app.open_comparison(converted(tiny_images.dit_pipeline(), tmp_path), device="cpu"))
    handler = next(function.fn for function in page.fns.values() if function.api_name == "generate")

    async def run():
        return [output async for output in handler(None, 7, 2, 1, 2.0)]

    (original, nothing, no_times), (again, mhla, times) = asyncio.run(run())
    page.close()
    assert nothing is None and no_times == "" and "with softmax attention" in times
    assert (original == again).all() and original.shape == mhla.shape and (original != mhla).any()


def test_language_models_answer_alike_each_time(saved_language_model):
    comparison = app.open_comparison(saved_language_model.model, device="cpu")
    request = {"prompt": "once upon", "new_tokens": 12}
    assert list(app.request_inputs(comparison)) == list(request)
    first, again = (app.generate(comparison, "mhla", request, threading.Event()) for _ in range(2))
    assert first[0] == again[0] and len(first[0]) > 0
    assert first.tokens == len(comparison.tokenizer("once upon").input_ids) + 12
    stopped = threading.Event()
    stopped.set()
    assert len(app.generate(comparison, "mhla", request, stopped)[0]) < len(first[0])
    app.build_page(comparison).close()


def test_stopped_work_ends_before_the_next_step_and_frees_the_models(comparison):
    stop = threading.Event()
    calls = []
    hook = comparison.sides["mhla"].transformer.register_forward_hook(lambda *_: (calls.append(1), stop.set()))
    with pytest.raises(app._Stopped):
        app.generate(comparison, "mhla", {**VIDEO, "num_inference_steps": 40}, stop)
    hook.remove()
    assert len(calls) == 1 and not comparison.lock.locked()
    assert not comparison.sides["mhla"].transformer._forward_pre_hooks


def test_the_server_answers_with_both_videos_and_their_times(server, client):
    import imageio.v3

    seen: dict[str, list] = {}
    hooks = [
        side.transformer.register_forward_pre_hook(
            lambda module, args, kwargs: seen.setdefault(type(module).__name__, []).append(kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for side in server.comparison.sides.values()
    ]
    original, mhla, times = client.predict(*VIDEO.values(), api_name="/generate")
    for hook in hooks:
        hook.remove()
    noise = [calls[0] for calls in seen.values()]
    assert len(noise) == 2 and (noise[0] == noise[1]).all()
    videos = [np.asarray(imageio.v3.imread(video)) for video in (original, mhla)]
    assert [video.shape for video in videos] == [(9, 160, 320, 3)] * 2
    assert (videos[0] != videos[1]).any()
    assert "with softmax attention and **" in times and "ms** with MHLA" in times


def test_the_server_draws_mixing_weights(client):
    plots = [client.predict("blocks.0.attn1", "1", block, api_name="/mixing") for block in (0, 5)]
    assert [plot.count("<svg") for plot in plots] == [2, 2] and plots[0] != plots[1]


@pytest.mark.parametrize("change", [{"num_inference_steps": 1000}, {"height": 4096}, {"seed": -1}])
def test_the_server_refuses_requests_beyond_the_bounds(client, change):
    with pytest.raises(gradio_client.exceptions.AppError, match="than (minimum|maximum) value"):
        client.predict(*{**VIDEO, **change}.values(), api_name="/generate")


def test_cancelling_stops_the_work(server, client):
    calls = []
    transformer = server.comparison.sides["original"].transformer
    hook = transformer.register_forward_pre_hook(lambda *_: (calls.append(1), time.sleep(0.1)))
    job = client.submit(*{**VIDEO, "num_inference_steps": 50}.values(), api_name="/generate")
    while not calls:
        time.sleep(0.05)
    job.cancel()
    time.sleep(1.5)
    before = len(calls)
    time.sleep(1)
    hook.remove()
    assert len(calls) == before < 60


def test_the_server_keeps_files_and_its_queue_to_itself(server, saved_pipeline):
    for path in ("/etc/passwd", saved_pipeline.model / "model_index.json", Path(__file__), "pyproject.toml"):
        answer = httpx.get(f"{server.url}gradio_api/file={path}", timeout=30)
        assert answer.status_code in (403, 404), path
    upload = httpx.post(server.url + "gradio_api/upload", files={"files": ("a.bin", b"0" * 5000)}, timeout=30)
    assert upload.status_code >= 400
    direct = httpx.post(server.url + "gradio_api/run/generate", json={"data": list(VIDEO.values())}, timeout=30)
    assert direct.status_code >= 400


def test_building_and_serving_asks_nobody_else(saved_pipeline, monkeypatch):
    connections = []
    connect = socket.socket.connect

    def watched(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            connections.append(str(address[0]))
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    with running(saved_pipeline) as server:
        httpx.get(server.url, timeout=30).raise_for_status()
    assert set(connections) <= {"127.0.0.1", "localhost", "::1"}


def test_records_say_whether_a_model_was_recovered(saved_pipeline, tmp_path):
    moved = shutil.copytree(saved_pipeline.model, tmp_path / "moved")
    record = json.loads((moved / "conversion.json").read_text())
    figures = {"family": "wan", "figures": {"softmax": {"loss": 1.0}, "calibrate": {"loss": 2.0}}}
    trained = {**figures, "figures": {**figures["figures"], "distill": {"loss": 1.5}}}
    # The last ones are whatever a file of others holds.
    for recovery, expected in [(figures, False), (trained, True), (7, False), ({"figures": 7}, False)]:
        (moved / "conversion.json").write_text(json.dumps({**record, "recovery": recovery}))
        assert app.open_comparison(moved, saved_pipeline.original, device="cpu").recovered == expected


def test_times_are_compared_in_words(comparison):
    fast, slow = (app.Output(None, seconds, 2304) for seconds in (0.2, 0.5))
    assert "At **2,304 tokens**" in app.describe_times(comparison, slow, fast)
    assert "**200 ms** with MHLA: 2.5 times as fast. " in app.describe_times(comparison, slow, fast)
    assert "MHLA: 2.5 times as long. " in app.describe_times(comparison, fast, slow)
    assert "MHLA: about the same. " in app.describe_times(comparison, fast, fast)


def test_break_even_lengths_are_those_of_the_stored_measurements():
    def tokens(text: str) -> list[int]:
        return [int(number.replace(",", "")) for number in re.findall(r"[\d,]{3,}", text)]

    op, decode = (json.loads((ROOT / "benchmarks" / "results" / f"{name}-amd-epyc{end}.json").read_text())
                  for name, end in (("op-2026-11-27", ""), ("decode-2026-11-28", "-dynamic")))  # fmt: skip
    ratios = {
        row["tokens"]: row["speedup_over_softmax"]
        for row in op["results"]
        if (row["contestant"], row["direction"], row["chunk"]) == ("mhla-torch", "forward", None)
        and row["normalizer"] == "query" and not row["shape"].startswith("sana")
    }  # fmt: skip
    below, above = tokens(app.BREAK_EVEN["cpu", "pixels"])
    assert ratios[below] < 1 < ratios[above]
    rows = {row["context"]: row for row in decode["results"] if row["dtype"] == "float32"}
    below, above = tokens(app.BREAK_EVEN["cpu", "text"])
    slower, faster = (rows[context]["mhla"]["seconds_per_token"] for context in (below, above))
    assert slower > rows[below]["softmax"]["seconds_per_token"]
    assert faster < rows[above]["softmax"]["seconds_per_token"]


def test_what_cannot_be_compared_is_refused(saved_pipeline, saved_language_model, tmp_path):
    with pytest.raises(ValueError, match="has no MHLA model .*convert it first"):
        app.open_comparison(saved_pipeline.original)
    with pytest.raises(ValueError, match="original .*tiny-llama has no softmax model for transformer of .*tiny-mhla"):
        app.open_comparison(saved_pipeline.model, saved_language_model.original)
    with pytest.raises(ValueError, match="is a model without a pipeline"):
        app.open_comparison(saved_pipeline.model / "transformer", saved_pipeline.original / "transformer")
    moved = shutil.copytree(saved_pipeline.model, tmp_path / "moved")
    forget_path(moved)
    with pytest.raises(ValueError, match="original must be given: .*moved comes from tiny-wan"):
        app.open_comparison(moved, device="cpu")
    assert app.open_comparison(moved, saved_pipeline.original, device="cpu").location == "tiny-wan"


def test_models_that_generate_nothing_from_a_prompt_are_refused(tmp_path):
    from transformers import BertConfig, BertModel

    from mhla_hf import convert_pretrained

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path / "bert")
    convert_pretrained(tmp_path / "bert", tmp_path / "mhla-bert", {"block_size": [16]}, progress=False)
    with pytest.raises(ValueError, match="BertModel, which generates nothing"):
        app.open_comparison(tmp_path / "mhla-bert")
    model = converted(tiny.wan_pipeline(image_to_video=True), tmp_path)
    with pytest.raises(ValueError, match="WanImageToVideoPipeline, which needs more than a prompt"):
        app.create_app(model, device="cpu")


@pytest.mark.slow
def test_without_a_model_the_demo_is_converted_and_calibrated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with app.demo_model() as (directory, original):
        comparison = app.open_comparison(directory, original, device="cpu")
        assert not comparison.recovered
        assert app.request_inputs(comparison)["prompt"].value == "a six moves up"
    assert not directory.exists()
    (tmp_path / "demo-output" / "mhla").mkdir(parents=True)
    (tmp_path / "demo-output" / "mhla" / "model_index.json").write_text("{}")
    with app.demo_model() as (directory, _):
        assert directory.parts == ("demo-output", "mhla")
