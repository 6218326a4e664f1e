# SPDX-License-Identifier: Apache-2.0
"""Videos, caches, checkpoints and metrics: what training reads and writes."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mhla_hf.training import LatentDataset
from mhla_hf.training.checkpoints import (
    Position,
    collect_state,
    find_checkpoint,
    list_checkpoints,
    load_optimizer,
    load_weights,
    read_state,
    save_checkpoint,
)
from mhla_hf.training.config import CacheConfig
from mhla_hf.training.data.cache import Encoder
from mhla_hf.training.data.cache_building import build_cache, cache_settings, finish_cache, start_cache
from mhla_hf.training.data.fingerprints import folder_fingerprint
from mhla_hf.training.data.folders import DataSample, UnusableSampleError
from mhla_hf.training.data.images import fit, to_tensor
from mhla_hf.training.data.videos import captioned_videos, read_frames, write_video
from mhla_hf.training.families import FAMILIES
from mhla_hf.training.families.wan import encode_videos
from mhla_hf.training.loading import PipelineSource
from mhla_hf.training.metrics import MetricsFile, read_metrics
from mhla_hf.utils.destinations import atomic_directory, lock_output, remove_leftovers
from mhla_hf.utils.files import atomic_file

from ... import tiny


def moving_square(frames: int = 9, height: int = 16, width: int = 24) -> np.ndarray:
    video = np.zeros((frames, height, width, 3), dtype=np.uint8)
    for number in range(frames):
        video[number, 4:12, number : number + 8] = 255
    return video


@pytest.fixture(scope="module")
def pipeline():
    return tiny.wan_pipeline()


@pytest.fixture(scope="module")
def pipeline_directory(pipeline, tmp_path_factory):
    directory = tmp_path_factory.mktemp("wan")
    pipeline.save_pretrained(directory)
    return directory


class TestVideos:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in ("b.mp4", "a.mp4"):
            write_video(tmp_path / name, moving_square(), fps=8)
        return tmp_path

    def test_captions_beside_the_videos(self, folder):
        (folder / "a.txt").write_text("a square moves right\n")
        samples = captioned_videos(folder, num_frames=5, height=16, width=16)
        assert samples[0].load().shape == (3, 5, 16, 16)
        with pytest.raises(UnusableSampleError, match=r"b\.mp4 has no caption"):
            samples[1].load()
        (folder / "b.txt").write_text("again")
        samples = captioned_videos(folder, num_frames=5, height=16, width=16)
        assert [sample.condition for sample in samples] == ["a square moves right", "again"]
        video = samples[0].load()
        assert video.shape == (3, 5, 16, 16) and video.dtype == torch.float32
        assert video.min() >= -1 and video.max() > 0.5
        with pytest.raises(UnusableSampleError, match=r"a\.mp4 has fewer than 13 frames"):
            captioned_videos(folder, num_frames=13, height=16, width=16)[0].load()

    def test_captions_in_a_metadata_file(self, folder):
        rows = [{"file_name": "b.mp4", "text": "second"}, {"file_name": "a.mp4", "text": "first"}]
        (folder / "metadata.csv").write_text("video,caption\nb.mp4,from csv\n")
        assert [s.condition for s in captioned_videos(folder, num_frames=1, height=8, width=8)] == ["from csv"]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        samples = captioned_videos(folder, num_frames=1, height=8, width=8)
        assert [(s.condition, s.key.split(":")[0]) for s in samples] == [("second", "b.mp4"), ("first", "a.mp4")]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"file_name": "c.mp4", "text": "x"}', "does not exist"),
            ('{"file_name": "a.mp4"}', "entry 1"),
            ("{", "line 1"),
        ],
        ids=["missing file", "missing caption", "bad json"],
    )
    def test_bad_metadata_is_named(self, folder, content, message):
        (folder / "metadata.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            captioned_videos(folder, num_frames=1, height=8, width=8)

    def test_bad_folders_are_named(self, tmp_path):
        with pytest.raises(ValueError, match="existing folder"):
            captioned_videos(tmp_path / "none", num_frames=1, height=8, width=8)
        with pytest.raises(ValueError, match="has no videos"):
            captioned_videos(tmp_path, num_frames=1, height=8, width=8)

    def test_gif_and_frame_rate(self, tmp_path):
        images = [Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)) for number in range(8)]
        path = tmp_path / "steps.gif"
        images[0].save(path, save_all=True, append_images=images[1:], duration=100)
        assert read_frames(path, 8)[:, 0, 0, 0].tolist() == [10 * number for number in range(8)]
        assert read_frames(path, 4, fps=5)[:, 0, 0, 0].tolist() == [0, 20, 40, 60]
        assert read_frames(path, 4, fps=20)[:, 0, 0, 0].tolist() == [0, 0, 10, 20]

    def test_unreadable_files_are_named(self, tmp_path):
        for name in ("broken.gif", "broken.mp4"):
            (tmp_path / name).write_bytes(b"this is no video")
            with pytest.raises(UnusableSampleError, match=name):
                read_frames(tmp_path / name, 1)

    def test_frames_are_scaled_to_cover_and_cropped(self):
        video = fit_frames(moving_square(2, 16, 48), 32, 32)
        assert video.shape == (3, 2, 32, 32)
        exact = fit_frames(moving_square(1, 8, 8), 8, 8)
        assert torch.equal(exact, torch.from_numpy(moving_square(1, 8, 8)).permute(3, 0, 1, 2) / 127.5 - 1)


def fit_frames(frames, height, width):
    return to_tensor(np.stack([fit(Image.fromarray(frame), height, width) for frame in frames]))


class TestCache:
    config = CacheConfig(data="videos", height=16, width=16, num_frames=5, max_sequence_length=48)

    def samples(self, count=3, frames=5):
        def load(number):
            if number == 1:
                raise UnusableSampleError("square 1 has fewer than 5 frames")
            return fit_frames(moving_square(frames), 16, 16) * (1 - number / 10)

        return [
            DataSample(f"square {number}", f"a square {number}", lambda number=number: load(number))
            for number in range(count)
        ]

    def settings(self, pipeline_directory):
        return cache_settings(pipeline_directory, self.config, FAMILIES["wan"].folders)

    def build(self, directory, pipeline, pipeline_directory, samples, **options):
        work = start_cache(directory, self.settings(pipeline_directory))
        if work:
            build_cache(directory, Encoder(FAMILIES["wan"], pipeline, self.config), samples, progress=False, **options)
        return work

    def test_samples_come_back_as_the_pipeline_makes_them(self, pipeline, pipeline_directory, tmp_path):
        samples = self.samples()
        assert self.build(tmp_path, pipeline, pipeline_directory, samples)
        with pytest.raises(ValueError, match="unfinished"):
            LatentDataset(tmp_path)
        finish_cache(tmp_path, samples)
        dataset = LatentDataset(tmp_path)
        # The second video is too short: it is left out and named.
        assert len(dataset) == 2 and dataset.manifest["skipped"] == ["square 1"]
        assert dataset.latent_shape == (16, 2, 2, 2)
        assert torch.equal(dataset[0]["latents"], encode_videos(pipeline.vae, samples[0].load()[None])[0])
        expected, empty = pipeline.encode_prompt("a square 2", negative_prompt="", max_sequence_length=48)
        assert torch.allclose(dataset[1]["prompt_embeds"], expected[0], atol=1e-6)
        assert torch.allclose(dataset.null_condition["prompt_embeds"], empty[0], atol=1e-6)
        assert not self.build(tmp_path, pipeline, pipeline_directory, samples)

    def test_latents_decode_to_what_was_encoded(self, pipeline):
        """Normalisation is the inverse of the pipeline's."""
        video = torch.rand(3, 5, 16, 16) * 2 - 1
        latents = encode_videos(pipeline.vae, video[None])[0]
        mean = torch.tensor(pipeline.vae.config.latents_mean).view(-1, 1, 1, 1)
        deviation = torch.tensor(pipeline.vae.config.latents_std).view(-1, 1, 1, 1)
        expected = pipeline.vae.encode(video[None]).latent_dist.mode()[0]
        assert torch.allclose(latents * deviation + mean, expected, atol=1e-5)

    def test_an_interrupted_cache_goes_on(self, pipeline, pipeline_directory, tmp_path):
        samples, loads = self.samples(), []
        counted = [
            DataSample(
                sample.key, sample.condition, lambda sample=sample: (loads.append(sample.key), sample.load())[1]
            )
            for sample in samples
        ]
        self.build(tmp_path, pipeline, pipeline_directory, counted, rank=0, world_size=2)
        assert loads == ["square 0", "square 2"]
        # A truncated file, as a full disk may leave, is made again.
        broken = tmp_path / "samples" / "000002.safetensors"
        broken.write_bytes(broken.read_bytes()[:20])
        (tmp_path / "samples" / "000009.safetensors").write_bytes(b"left from a larger run")
        self.build(tmp_path, pipeline, pipeline_directory, counted)
        assert loads[2:] == ["square 1", "square 2"]
        finish_cache(tmp_path, counted)
        assert len(LatentDataset(tmp_path)) == 2
        assert sorted(os.listdir(tmp_path / "samples")) == ["000000.safetensors", "000002.safetensors"]

    def test_a_cache_of_other_settings_is_refused(self, pipeline_directory, tmp_path):
        settings = self.settings(pipeline_directory)
        start_cache(tmp_path, settings)
        with pytest.raises(ValueError, match="height 16 not 64"):
            start_cache(tmp_path, {**settings, "height": 64})
        with pytest.raises(ValueError, match="does not exist"):
            LatentDataset(tmp_path / "none")
        (tmp_path / "cache.json").write_text('{"format_version": 99}')
        with pytest.raises(ValueError, match="format 99"):
            LatentDataset(tmp_path)

    def test_a_cache_without_videos_is_refused(self, pipeline_directory, tmp_path):
        start_cache(tmp_path, self.settings(pipeline_directory))
        with pytest.raises(ValueError, match="none of the 3 samples"):
            finish_cache(tmp_path, self.samples())

    def test_sizes_must_fit_the_pipeline(self, pipeline_directory):
        sizes = PipelineSource(pipeline_directory).sizes
        for changes, message in (
            ({"height": 40}, "height must be a multiple of 16"),
            ({"width": 40}, "width must be a multiple of 16"),
            ({"num_frames": 6}, "num_frames must be a multiple of 4 plus 1"),
        ):
            with pytest.raises(ValueError, match=message):
                sizes.complete(self.config.replace(**changes))

    def test_sizes_have_defaults(self, pipeline_directory):
        sizes = PipelineSource(pipeline_directory).sizes
        for options, expected in (
            ({}, (480, 832, 81, 512)),
            ({"data": "digits"}, (64, 64, 17, 512)),
            ({"data": "digits", "width": 32, "max_sequence_length": 9}, (32, 32, 17, 9)),
        ):
            config = sizes.complete(CacheConfig(**options))
            assert (config.height, config.width, config.num_frames, config.max_sequence_length) == expected

    def test_fingerprints_notice_changed_weights(self, tmp_path):
        save_file({"weight": torch.zeros(400000)}, tmp_path / "model.safetensors")
        before = folder_fingerprint(tmp_path)
        assert folder_fingerprint(tmp_path) == before
        save_file({"weight": torch.cat([torch.zeros(399999), torch.ones(1)])}, tmp_path / "model.safetensors")
        assert folder_fingerprint(tmp_path) != before


class TestCheckpoints:
    def trained(self, steps=2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, [name for name, _ in model.named_parameters()]

    def save(self, directory, stage="finetune", step=2, **options):
        model, optimizer, names = self.trained()
        weights, moments = collect_state(model, optimizer, names)
        return save_checkpoint(directory, Position.of(stage, step), weights, moments, {"note": "x"}, **options)

    def test_weights_and_moments_come_back(self, tmp_path):
        path = self.save(tmp_path)
        model, optimizer, names = self.trained(steps=2)
        fresh, fresh_optimizer, _ = self.trained(steps=0)
        load_weights(path, fresh, names)
        load_optimizer(path, fresh, fresh_optimizer, names)
        assert read_state(path)["note"] == "x"
        inputs = torch.randn(5, 3)
        for candidate, its_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
            candidate(inputs).square().mean().backward()
            its_optimizer.step()
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_nothing_but_plain_files(self, tmp_path):
        path = self.save(tmp_path)
        assert sorted(os.listdir(path)) == ["model.safetensors", "optimizer.safetensors", "state.json"]
        assert "0.weight::exp_avg" in load_file(path / "optimizer.safetensors")

    def test_latest_is_the_furthest_and_complete(self, tmp_path):
        assert find_checkpoint("latest", tmp_path) is None
        assert find_checkpoint(None, tmp_path) is None
        for stage, step in (("finetune", 5), ("transfer", 20), ("finetune", 10)):
            self.save(tmp_path, stage, step)
        (tmp_path / ".tmp-finetune-00000099-1").mkdir()
        (tmp_path / "notes").mkdir()
        assert find_checkpoint("latest", tmp_path).name == "finetune-00000010"
        assert find_checkpoint("transfer-00000020", tmp_path).name == "transfer-00000020"
        with pytest.raises(ValueError, match="already holds"):
            find_checkpoint(None, tmp_path)
        with pytest.raises(ValueError, match="one of: transfer-00000020, finetune-00000005"):
            find_checkpoint("finetune-7", tmp_path)
        with pytest.raises(ValueError, match="not a checkpoint"):
            find_checkpoint("notes", tmp_path)

    def test_the_oldest_go_first(self, tmp_path):
        for stage, step in (("transfer", 1), ("transfer", 2), ("finetune", 1)):
            self.save(tmp_path, stage, step, total_limit=2)
        assert [path.name for path in list_checkpoints(tmp_path)] == ["transfer-00000002", "finetune-00000001"]

    def test_sharded_parameters_are_saved_whole(self, tmp_path):
        """Under FSDP2 parameters and moments are DTensors; a checkpoint has whole tensors, and goes back to shards."""
        import torch.distributed as distributed
        from torch.distributed.fsdp import fully_shard

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            path = self.save(tmp_path)
            model, _, names = self.trained(steps=0)
            fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            load_weights(path, model, names)
            load_optimizer(path, model, optimizer, names)
            weights, moments = collect_state(model, optimizer, names)
        finally:
            distributed.destroy_process_group()
        for file, tensors in (("model", weights), ("optimizer", moments)):
            saved = load_file(path / f"{file}.safetensors")
            assert saved.keys() == tensors.keys()
            assert all(torch.equal(saved[name], tensors[name]) for name in saved)

    def test_foreign_or_damaged_checkpoints_are_refused(self, tmp_path):
        path = self.save(tmp_path)
        model, optimizer, names = self.trained()
        with pytest.raises(ValueError, match="of another run"):
            load_weights(path, model, names[:-1])
        with pytest.raises(ValueError, match="does not train here"):
            load_optimizer(path, model, optimizer, names[:1])
        wider = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        with pytest.raises(ValueError, match="shape"):
            load_weights(path, wider, names)
        (path / "model.safetensors").write_bytes(b"x")
        with pytest.raises(ValueError, match="cannot be read"):
            load_weights(path, model, names)
        (path / "state.json").write_text('{"format_version": 0}')
        with pytest.raises(ValueError, match="format 0"):
            read_state(path)
        (path / "state.json").unlink()
        with pytest.raises(ValueError, match=r"state\.json"):
            read_state(path)


class TestFiles:
    def test_a_failed_write_leaves_the_old_content(self, tmp_path):
        directory, file = tmp_path / "directory", tmp_path / "file"
        with atomic_directory(directory) as temporary:
            (temporary / "content").write_text("old")
        file.write_text("old")
        with pytest.raises(RuntimeError), atomic_directory(directory) as temporary:
            (temporary / "content").write_text("new")
            raise RuntimeError
        with pytest.raises(RuntimeError), atomic_file(file) as temporary:
            temporary.write_text("new")
            raise RuntimeError
        assert (directory / "content").read_text() == file.read_text() == "old"
        assert sorted(os.listdir(tmp_path)) == ["directory", "file"]
        with atomic_directory(directory) as temporary:
            (temporary / "other").write_text("new")
        assert os.listdir(directory) == ["other"]

    def test_leftovers_are_removed(self, tmp_path):
        (tmp_path / ".tmp-0123abcd-directory").mkdir()
        (tmp_path / ".tmp-0123abcd-file").write_text("x")
        for name in ("kept", ".tmp-of-another-program"):
            (tmp_path / name).write_text("x")
        remove_leftovers(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [".tmp-of-another-program", "kept"]

    def test_metrics_are_cut_to_the_resumed_step(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        metrics = MetricsFile(path)
        for stage, count in (("transfer", 3), ("finetune", 4)):
            for step in range(1, count + 1):
                metrics.append({"stage": stage, "step": step, "loss": 1.0})
        metrics.close()
        with path.open("a") as file:
            file.write('{"stage": "fine')
        metrics = MetricsFile(path, Position.of("finetune", 2))
        metrics.append({"stage": "finetune", "step": 3, "loss": 2.0})
        metrics.close()
        expected = [("transfer", 1), ("transfer", 2), ("transfer", 3), *(("finetune", step) for step in (1, 2, 3))]
        assert [(row["stage"], row["step"]) for row in read_metrics(path)] == expected
        MetricsFile(path).close()
        assert read_metrics(path) == [] == read_metrics(tmp_path / "none")

    def test_one_run_at_a_time(self, tmp_path):
        lock = lock_output(tmp_path)
        with pytest.raises(ValueError, match="in use by another run"):
            lock_output(tmp_path, patience=0.0)
        lock.close()
        lock_output(tmp_path, patience=0.0).close()
