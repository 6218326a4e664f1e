# SPDX-License-Identifier: Apache-2.0
"""Model cards: nothing that was not measured, nothing of others' texts but text, and no user's card overwritten."""

import math
import re

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from safetensors.torch import save_file

from mhla_hf import MHLAConfig
from mhla_hf.bench import BenchOptions, measure_operator
from mhla_hf.hub import CardText, model_card, write_card
from mhla_hf.hub.card import card_for_repository
from mhla_hf.utils.model_cards import is_generated
from tests.command_line import run_command
from tests.edits import write_json


WAN_OPTIONS = {
    "blocks": [5, 4, 4],
    "grid": [5, 8, 8],
    "layers": [1, 2, 4],
    "feature_map": "hedgehog",
    "lepe_kernel": 3,
}
RECOVERY = {
    "family": "wan",
    "data": {"kind": "latents", "samples": 160, "held_out": 48, "draws": 2, "shape": [8, 5, 16, 16]},
    "figures": {
        "softmax": {"loss": 0.1757},
        "converted": {"loss": 0.5812, "above_softmax_percent": 230.75},
        "match": {"loss": 0.1941, "above_softmax_percent": 10.44},
        "distill": {"loss": 0.1889, "above_softmax_percent": 7.51},
    },
    "recipe": {
        "match": {"steps": 1000, "batch_size": 1, "learning_rate": 0.004, "mhla_learning_rate": 0.02},
        "distill": {"steps": 200, "batch_size": 4, "learning_rate": 0.0002, "mhla_learning_rate": None},
        "mhla": {"blocks": [5, 4, 4]},
    },
    "seconds": {"match": {"seconds": 37.34, "cpu_seconds": 73.42}, "distill": {"seconds": 43.98, "cpu_seconds": 86.6}},
    "stages": {},
    "seed": 3,
    "machine": {"device": "Some CPU", "threads": 2, "date": "2026-01-31", "torch": "2.13.0"},
}
CONVERSION = {
    "schema_version": 2,
    "command": "convert",
    "source": {"location": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "commit": "0" * 40},
    "source_card": {"license": "apache-2.0", "language": ["en", "zh"]},
    "components": {
        "transformer": {
            "num_layers": 5,
            "mhla_layers": [1, 2, 4],
            "mhla": {},
            "initialised": {"blocks.1.attn1.mhla.mixing": {"shape": [80, 80], "values": "linear"}},
            "weight_sets": [{"copied_parameters": 1_000_000}],
        }
    },
}
TRAINING = {
    "config": {
        "transfer_steps": 500, "distill_steps": 0, "max_steps": 2000, "learning_rate": 2e-5, "batch_size": 4,
        "gradient_accumulation_steps": 2, "seed": 7, "train": "full", "mixed_precision": "bf16",
    },
    "world_size": 8,
    "dataset_size": 1234,
    "final_losses": {"transfer": 0.0123, "finetune": 0.4567},
}  # fmt: skip
SPEED = {
    "benchmark": "model",
    "machine": {"device": "Some CPU", "threads": 8, "torch": "2.13.0", "date": "2026-02-01"},
    "options": {"dtype": "float32", "compile_backend": "inductor"},
    "results": [
        {"model": "wan", "tokens": 31500, "contestant": "ordinary", "attention": "softmax", "milliseconds": 81250.4,
         "peak_memory_bytes": 3 * 10**9, "speedup_over_ordinary": 1.0, "reason": None},
        {"model": "wan", "tokens": 31500, "contestant": "mhla-torch", "attention": "mhla", "milliseconds": 401.25,
         "peak_memory_bytes": None, "speedup_over_ordinary": 202.5, "reason": None},
        {"model": "wan", "tokens": 31500, "contestant": "mhla-triton", "attention": "mhla", "reason": "no GPU"},
    ],
}  # fmt: skip
INVENTED = re.compile(r"None|\bnan\b|\binf\b|n/a|unknown|Ellipsis|\{\{|\{%", re.IGNORECASE)
CITATION = re.compile(r"## Citation.*", re.DOTALL)


@pytest.fixture
def directory(tmp_path):
    """A Wan pipeline with a configuration and two tensors."""
    folder = tmp_path / "wan-mhla"
    class_name = "MHLAWanTransformer3DModel"
    write_json(folder / "model_index.json", {"_class_name": "WanPipeline", "transformer": ["diffusers", class_name]})
    config = {"_class_name": class_name, "num_layers": 5, "patch_size": [1, 2, 2], "mhla": WAN_OPTIONS}
    write_json(folder / "transformer/config.json", config)
    tensors = {"blocks.1.attn1.mhla.mixing": torch.zeros(80, 80), "proj_out.weight": torch.zeros(100, 100)}
    save_file(tensors, folder / "transformer/diffusion_pytorch_model.safetensors")
    return folder


@pytest.fixture
def complete(directory):
    """The same with all records."""
    write_json(directory / "conversion.json", CONVERSION)
    write_json(directory / "report.json", RECOVERY)
    write_json(directory / "training.json", TRAINING)
    return directory


def written(directory, **options):
    """The card as a reader of the file finds it."""
    card = model_card(directory, **options)
    assert is_generated(str(card))
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()
    return card


def section(card, title):
    found = re.search(rf"^## {title}\n(.*?)(?=^## )", card.text, re.DOTALL | re.MULTILINE)
    return None if found is None else found[1]


# What it says


def test_everything_known_is_said(complete):
    card = written(complete, repo_id="you/wan-mhla")
    data = card.data.to_dict()
    assert data["base_model"] == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers" and data["license"] == "apache-2.0"
    assert data["language"] == ["en", "zh"] and data["pipeline_tag"] == "text-to-video"
    text = card.text
    assert "# Wan2.1-T2V-1.3B-Diffusers with MHLA\n" in text
    assert "(https://huggingface.co/Wan-AI/Wan2.1-T2V-1.3B-Diffusers)" in text
    assert "softmax attention in 1 of its 5 layers" in text
    attention = section(card, "Attention")
    assert "16,400 parameters, 6,400 of them added by MHLA" in attention
    for name, value in {"layers": "1, 2, 4", "blocks": "5, 4, 4", "feature_map": "hedgehog"}.items():
        assert f"| `{name}` | `{value}` |" in attention
    assert "window" not in attention and "gate" not in attention
    training = section(card, "Training")
    assert "on 160 samples and 48 held-out samples. The teacher" in training
    assert "| match | 1,000 | 0.004 | 37.34 | 73.42 |" in training
    assert "matching: each layer alone" in training and "calibration" not in training
    assert "Run on Some CPU, 2026-01-31. Seed 3." in training
    for name, value in {"max_steps": "2000", "learning_rate": "2e-05", "mixed_precision": "bf16"}.items():
        assert f"| `{name}` | `{value}` |" in training
    evaluation = section(card, "Evaluation")
    assert "| softmax (original) |  | 0.1757 |" in evaluation and "| model | above softmax, % | loss |" in evaluation
    assert "| distilled | 7.51 | 0.1889 |" in evaluation
    use = section(card, "Use")
    assert use.count('"you/wan-mhla"') == 1 and "trust_remote_code=True" in use and "load_pipeline(" in use


def test_speed_and_memory(complete, tmp_path):
    operator = measure_operator(
        BenchOptions(seconds=0.01, quick=True, device="cpu"), ["dit-256-small"], ["mhla-torch", "softmax"]
    )
    files = [tmp_path / "op.json", tmp_path / "model.json"]
    for path, report in zip(files, (operator, SPEED)):
        write_json(path, report)
    card = written(complete, benchmarks=files)
    assert_nothing_invented(written(complete, benchmarks=files[1:]))
    first, second = section(card, "Speed and memory").split("Forward passes of models of these sizes")
    assert operator["machine"]["date"] in first and "| speed / softmax | peak memory |" in first
    assert first.count("\n| dit-256-small | ") == 6 and "| fwd+bwd | mhla-torch | query | 256 | float32 | " in first
    assert "compiled by inductor. Measured on Some CPU, 8 CPU threads, torch 2.13.0, 2026-02-01.\n" in second
    assert "| wan | ordinary | softmax | 31,500 | float32 | 81,250 | 1 | 3.0 GB |" in second
    assert "| wan | mhla-torch | mhla | 31,500 | float32 | 401.2 | 202.5 |  |" in second
    assert "mhla-triton" not in second and "no GPU" not in second
    write_card(complete)
    assert "Some CPU, 8 CPU" in card_for_repository(complete, "you/mine", files)


def test_results_are_those_of_the_hub(complete, tmp_path):
    write_card(complete)
    metadata = metadata_load(complete / "README.md")
    name, results = model_index_to_eval_results(metadata["model-index"])
    assert name == "Wan2.1-T2V-1.3B-Diffusers with MHLA"
    (result,) = results
    assert (result.task_type, result.dataset_name) == ("text-to-video", "Held-out samples")
    assert (result.metric_type, result.metric_name, result.metric_value) == ("loss", "Loss", 0.1889)


# What it does not say


@pytest.mark.parametrize("present", [(), ("conversion",), ("report",), ("training",)])
def test_what_is_missing_is_left_out(complete, present):
    for name in {"conversion", "report", "training"} - set(present):
        (complete / f"{name}.json").unlink()
    card = written(complete)
    assert (section(card, "Evaluation") is not None) == ("report" in present)
    assert (section(card, "Training") is not None) == bool({"report", "training"} & set(present))
    assert (card.data.base_model is not None) == ("conversion" in present)
    assert (card.data.eval_results is not None) == ("report" in present)
    assert ("Not trained since" in card.text) == (present == ("conversion",))
    assert_nothing_invented(card)


def assert_nothing_invented(card):
    assert not INVENTED.search(CITATION.sub("", card.text)), card.text


# Texts of others


HOSTILE = [
    "</script><script>alert(1)</script>",
    "x\n---\nlicense: evil\n---\n# Owned",
    "`code` | cell | [link](javascript:alert(1)) ![image](https://example.org/x.png)",
    "{{ 7 * 7 }} {% raw %}",
    "\n\n## Evaluation\n\n| model | loss |\n|---|---|\n| mine | 0 |",
    "\u202e\x1b[31m\x00 https://example.org/ www.example.org <!-- ",
    "```\n```python\nimport os\n```",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_texts_of_others_stay_texts(complete, text, tmp_path):
    write_json(tmp_path / "speed.json", SPEED)
    usual = written(complete, benchmarks=[tmp_path / "speed.json"])
    write_json(complete / "conversion.json", {**CONVERSION, "source": {"location": text}})
    report = {**RECOVERY, "data": {**RECOVERY["data"], "origin": text}, "machine": {"device": text, "date": text}}
    write_json(complete / "report.json", report)
    config = {**TRAINING["config"], "mixed_precision": text, "train": text}
    write_json(complete / "training.json", {**TRAINING, "config": config})
    measured = dict.fromkeys(("model", "contestant", "attention"), text) | {"milliseconds": 1}
    texts = dict.fromkeys(("device", "torch", "date", "dtype", "compile_backend"), text)
    write_json(tmp_path / "speed.json", {**SPEED, "machine": texts, "options": texts, "results": [measured]})
    options = {"benchmarks": [tmp_path / "speed.json"], "repo_id": text}
    card = written(complete, text=CardText(name=text, prompt=text), **options)
    assert card.data.license == usual.data.license and set(card.data.to_dict()) <= {*usual.data.to_dict(), "widget"}
    assert re.findall("^#.*", card.text.partition("\n## ")[2], re.MULTILINE) == re.findall(
        "^#.*", usual.text.partition("\n## ")[2], re.MULTILINE
    )
    # Outside of code, which shows everything as it is.
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", CITATION.sub("", card.text), flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"<|(?<!\\)\]\(javascript|https?://example|\x1b|\x00|49", prose), prose
    assert not re.search(r"(?<!\\)\]\(http", re.sub(r"\]\(https://(arxiv\.org|huggingface\.co)/", "", prose))
    for block in re.findall(r"^```python\n(.*?)^```$", card.text, re.DOTALL | re.MULTILINE):
        compile(block, "card", "exec")


@pytest.mark.parametrize(
    "report",
    [{}, RECOVERY, {**SPEED, "benchmark": ["op"]}, {**SPEED, "benchmark": "decode"}]
    + [{**SPEED, "results": rows} for rows in (7, [7], [{"milliseconds": "1"}], [{"milliseconds": math.nan}])],
)
def test_other_reports_are_refused(complete, tmp_path, report):
    write_json(tmp_path / "other.json", report)
    with pytest.raises(ValueError, match="other.json has no measurement of mhla-hf bench op or mhla-hf bench model"):
        model_card(complete, benchmarks=[tmp_path / "other.json"])


# Kinds of models


def write_model(folder, class_name, model_type, **config):
    options = MHLAConfig(block_size=(64,), grid=(512,), causal="Causal" in class_name, resize="extend").to_dict()
    write_json(
        folder / "config.json", {"architectures": [class_name], "model_type": model_type, "mhla": options, **config}
    )


def test_a_language_model(tmp_path):
    write_model(tmp_path, "LlamaForCausalLM", "llama", num_hidden_layers=4, rope_parameters={"rope_type": "default"})
    report = {"family": "causal", "figures": {"softmax": {"bits_per_byte": 1.5}, "match": {"bits_per_byte": 1.51}}}
    data = {"kind": "text in packed rows", "samples": 100, "held_out": 20, "length": 512, "origin": "you/data:small"}
    write_json(tmp_path / "report.json", {**report, "data": data})
    card = written(tmp_path)
    assert card.data.datasets == ["you/data"]
    assert "on 100 samples and 20 held-out samples of `you/data:small`" in card.text
    assert "| matched | 1.51 |" in card.text
    assert "| `block_size` | `64` |" in card.text and "| `causal` | `True` |" in card.text
    assert "LlamaForCausalLM.from_pretrained(" in card.text
    assert "AutoTokenizer" not in card.text
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "AutoTokenizer.from_pretrained(" in written(tmp_path).text
    assert "load_pipeline" not in card.text


@pytest.mark.parametrize("architectures", [["X\n```\n<script>"], ["x; import os"], None])
def test_only_names_of_classes_become_code(architectures, tmp_path):
    write_model(tmp_path, "LlamaForCausalLM", "llama", architectures=architectures)
    text = written(tmp_path).text
    assert "<script>" not in re.sub("`.*`", "", text) and "import os" not in re.sub("`.*`", "", text)
    assert "from transformers import AutoModel\n" in text


@pytest.mark.parametrize(
    "config, message",
    [
        ({"_class_name": "WanTransformer3DModel"}, "has no MHLA model .*: convert it first"),
        ({"_class_name": "MHLAWanTransformer3DModel", "mhla": {"colour": 1}}, "config.json: mhla: .*colour"),
    ],
)
def test_other_directories_are_refused(tmp_path, config, message):
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ValueError, match=message):
        model_card(tmp_path)


# Files


def test_a_users_card_is_left_alone(complete):
    readme = complete / "README.md"
    assert write_card(complete) == readme
    first = readme.read_text()
    (complete / "report.json").unlink()
    assert write_card(complete) == readme and readme.read_text() != first
    readme.write_text(readme.read_text().replace("## Use", "## How to use it"))
    mine = readme.read_text()
    assert write_card(complete) is None and readme.read_text() == mine
    assert write_card(complete, overwrite=True) == readme and readme.read_text() != mine
    assert sorted(path.name for path in complete.iterdir() if path.name.startswith(".")) == []


def test_links_are_not_written_through(complete, tmp_path):
    # As in the Hub's cache, where the card is a link to a blob.
    card = write_card(complete).rename(tmp_path / "blob")
    (complete / "README.md").symlink_to(card)
    before = card.read_bytes()
    with pytest.raises(ValueError, match=r"README.md is a link, as in the Hub's cache; copy the directory"):
        write_card(complete)
    assert card.read_bytes() == before


def test_command(complete, tmp_path):
    def run(*arguments):
        return run_command("card", complete, *arguments, code=None, columns=300)

    write_json(tmp_path / "speed.json", SPEED)
    printed = run("--output", "-", "--name", "Mine", "--repo-id", "you/mine", "--benchmark", tmp_path / "speed.json")
    assert printed.exit_code == 0 and "# Mine\n" in printed.stdout and "## Speed and memory\n" in printed.stdout
    assert not (complete / "README.md").exists() and is_generated(printed.stdout)
    assert run().exit_code == 0 and is_generated((complete / "README.md").read_text())
    (complete / "README.md").write_text("# Mine\n")
    refused = run()
    assert refused.exit_code == 1 and "was written or edited by someone and is kept" in refused.output
    assert run("--output", tmp_path / "card.md").exit_code == 0
    assert run("--output", tmp_path / "card.md").exit_code != 0
    assert run("--overwrite", "--license", "<script>").exit_code != 0
    assert run("--overwrite").exit_code == 0 and is_generated((complete / "README.md").read_text())


def test_a_pushed_card_keeps_what_is_not_in_the_directory(complete):
    text = CardText(name="Mine", summary="What only I know.", license="mit")
    write_card(complete, text=text)
    kept = card_for_repository(complete, "you/mine")
    assert is_generated(kept) and "What only I know." in kept
    assert kept.count('"you/mine"') == 1 and "path/or/repository" not in kept
    (complete / "README.md").unlink()
    assert "# Wan2.1-T2V-1.3B-Diffusers with MHLA" in card_for_repository(complete, "you/mine")


@pytest.mark.parametrize("name", ["blockwise", "blocks"])
def test_block_matching_has_its_place_by_its_former_name_too(complete, name):
    parts = {part: {**RECOVERY[part], name: RECOVERY[part]["match"]} for part in ("figures", "seconds", "recipe")}
    write_json(complete / "report.json", {**RECOVERY, **parts})
    text = written(complete).text
    assert "| blocks matched |" in text and "- block matching: each block learns the original's hidden states" in text
