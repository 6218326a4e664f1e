# SPDX-License-Identifier: Apache-2.0
"""Saving and loading: what every MHLA model must do with MHLA, ordinary and damaged checkpoints."""

import copy
import json
import pickle

import pytest
import torch
from diffusers import AutoModel
from diffusers.models.attention import AttentionMixin
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import load_file, save_file

from mhla_hf import MHLAConfig, convert
from tests.families.model_case import (
    OPTION_SETS,
    ModelCase,
    assert_fresh,
    assert_same_parameters,
    mhla_parameters,
    recorded_warnings,
    relative_error,
)


WEIGHTS = "diffusion_pytorch_model.safetensors"


def kept_in_fp32(model: torch.nn.Module, name: str) -> bool:
    return any(part in name.split(".") for part in model._keep_in_fp32_modules)


def assert_dtypes(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """`dtype` everywhere but in the parameters that the class keeps in float32."""
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if kept_in_fp32(model, name) else dtype), name


class SavingChecks(ModelCase):
    @pytest.fixture(scope="class")
    @classmethod
    def ordinary_dir(cls, tmp_path_factory):
        """An ordinary checkpoint of the upstream class; tests do not change it."""
        folder = tmp_path_factory.mktemp("ordinary")
        cls().make(cls.upstream).save_pretrained(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def mhla_dir(cls, tmp_path_factory):
        """A trained MHLA checkpoint; tests do not change it."""
        folder = tmp_path_factory.mktemp("mhla")
        cls().make_mhla().save_pretrained(folder)
        return folder

    # From an MHLA directory

    @pytest.mark.smoke
    @pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
    def test_mhla_checkpoint_round_trip(self, options, tmp_path):
        model = self.make_mhla(**options)
        model.save_pretrained(tmp_path)
        with recorded_warnings() as warnings:
            loaded = self.mhla_class.from_pretrained(tmp_path)
        assert warnings == []
        assert type(loaded) is self.mhla_class and not loaded.training
        assert loaded.config.mhla == model.config.mhla == self.full_options(**options).to_dict()
        assert loaded.mhla_layers == model.mhla_layers
        assert_same_parameters(loaded, model)
        # Not to the bit: where a file puts its tensors in memory decides how they are summed.
        torch.testing.assert_close(self.run(loaded), self.run(model))

    def test_config_file_names_the_class_and_keeps_plain_options(self, mhla_dir):
        config = json.loads((mhla_dir / "config.json").read_text())
        assert config["_class_name"] == self.mhla_class.__name__
        assert MHLAConfig.from_dict(config["mhla"]).to_dict() == config["mhla"]

    def test_auto_model_finds_the_class(self, mhla_dir):
        assert type(AutoModel.from_pretrained(str(mhla_dir))) is self.mhla_class

    def test_sharded_checkpoint_round_trip(self, tmp_path):
        model = self.make_mhla()
        model.save_pretrained(tmp_path, max_shard_size="30KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        assert_same_parameters(self.mhla_class.from_pretrained(tmp_path), model)

    def test_variant_and_subfolder(self, tmp_path):
        model = self.make_mhla()
        model.save_pretrained(tmp_path / "transformer", variant="fp16")
        loaded = self.mhla_class.from_pretrained(tmp_path, subfolder="transformer", variant="fp16")
        assert_same_parameters(loaded, model)

    @pytest.mark.smoke
    def test_half_precision_keeps_fp32_parameters(self, mhla_dir, tmp_path):
        first = self.mhla_class.from_pretrained(mhla_dir, torch_dtype=torch.bfloat16)
        assert_dtypes(first, torch.bfloat16)
        assert any(kept_in_fp32(first, name) for name in mhla_parameters(first))
        first.save_pretrained(tmp_path)
        again = self.mhla_class.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
        assert_dtypes(again, torch.bfloat16)
        assert_same_parameters(again, first)
        full = self.mhla_class.from_pretrained(mhla_dir)
        output = self.run(first, dtype=torch.bfloat16)
        assert output.dtype == torch.bfloat16
        assert relative_error(output, self.run(full)) < 0.03

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_cast_as_a_whole(self, dtype):
        model = self.make_mhla()
        expected = self.run(model)
        model.to(dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert relative_error(self.run(model, dtype=dtype), expected) < 0.05

    # From an ordinary directory

    @pytest.mark.smoke
    @pytest.mark.parametrize(
        "arguments",
        [
            {},
            {"torch_dtype": torch.bfloat16},
            {"low_cpu_mem_usage": True},
            {"device_map": "auto"},
            {"device_map": {"": "cpu"}},
            {"device_map": "auto", "torch_dtype": torch.bfloat16},
        ],
        ids=lambda arguments: "-".join(map(str, [*arguments, *arguments.values()])) or "plain",
    )
    @pytest.mark.parametrize("options", ["default", "everything"])
    def test_ordinary_checkpoint(self, arguments, options, ordinary_dir):
        mhla = {**self.options, **OPTION_SETS[options]}
        with recorded_warnings() as warnings:
            model = self.mhla_class.from_pretrained(ordinary_dir, mhla=mhla, **arguments)
        assert_fresh(model)
        stock = self.upstream.from_pretrained(ordinary_dir, torch_dtype=arguments.get("torch_dtype"))
        assert_same_parameters(model, stock, only_common=True)
        assert_dtypes(model, arguments.get("torch_dtype", torch.float32))
        assert set(model.state_dict()) - set(stock.state_dict()) == set(mhla_parameters(model))
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert self.run(model, dtype=model.dtype).isfinite().all()
        about_weights = [message for message in warnings if "newly initiali" in message]
        assert len(about_weights) == 1
        assert f"{len(mhla_parameters(model))} MHLA parameter(s)" in about_weights[0]
        unchanged = self.mhla_class.starts_as_upstream(model.mhla_config)
        assert ("leave the model's output as it was" if unchanged else "the model before you use it") in about_weights[
            0
        ]
        # Whatever else diffusers says, it says of its own model too (device maps and dtypes).
        assert not [message for message in warnings if "mhla" in message.lower() and message not in about_weights]

    def test_ordinary_sharded_checkpoint(self, tmp_path):
        stock = self.make(self.upstream)
        stock.save_pretrained(tmp_path, max_shard_size="30KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        model = self.mhla_class.from_pretrained(tmp_path, mhla=self.options)
        assert_fresh(model)
        assert_same_parameters(model, stock, only_common=True)

    @pytest.mark.parametrize("everything", [True, False], ids=["all", "half"])
    def test_ordinary_checkpoint_through_disk_offload(self, everything, ordinary_dir, tmp_path):
        whole = self.mhla_class.from_pretrained(ordinary_dir, mhla=self.options)
        device_map = {"": "disk"}
        if not everything:
            names = [name for name, _ in [*whole.named_children(), *whole.named_parameters(recurse=False)]]
            device_map = {name: "cpu" for name in names if name != self.block_list}
            count = len(getattr(whole, self.block_list))
            device_map.update({f"{self.block_list}.{index}": ("cpu", "disk")[index % 2] for index in range(count)})
        model = self.mhla_class.from_pretrained(
            ordinary_dir, mhla=self.options, device_map=device_map, offload_folder=tmp_path
        )
        assert any(parameter.is_meta for parameter in model.parameters())
        torch.testing.assert_close(self.run(model), self.run(whole))

    def test_options_are_resolved_and_saved(self, ordinary_dir, tmp_path):
        model = self.mhla_class.from_pretrained(ordinary_dir)
        assert model.mhla_config.grid == self.mhla_class.reference_grid(model.config)
        assert model.mhla_config.blocks is not None
        model.save_pretrained(tmp_path)
        assert self.mhla_class.from_pretrained(tmp_path).config.mhla == model.config.mhla

    # What is refused

    @pytest.mark.smoke
    def test_damaged_checkpoint(self, mhla_dir, tmp_path):
        weights = load_file(mhla_dir / WEIGHTS)
        lost = next(name for name in sorted(weights) if ".mhla." not in name)
        save_file({name: value for name, value in weights.items() if name != lost}, tmp_path / WEIGHTS)
        (tmp_path / "config.json").write_text((mhla_dir / "config.json").read_text())
        with pytest.raises(ValueError, match="lacks 1 weight") as error:
            self.mhla_class.from_pretrained(tmp_path)
        assert lost in str(error.value)

    @pytest.mark.parametrize(
        "override, message",
        [
            ({"mixing_heads": "per_head"}, "stored under mixing_heads"),
            ({"mixing_constraint": "nonnegative"}, "mixing_constraint"),
            ({"layers": [1]}, "leave out .*blocks.0.attn1?.mhla"),
            ({"output_norm": False}, "leave out .*output_norm"),
            ({"layers": [7]}, "layers names"),
            ({"no_such_option": 1}, "no_such_option"),
            ({"causal": True}, "causal"),
            ({"blocks": [4]}, "axis"),
            ({"blocks": [4], "grid": [16]}, "each axis"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_incompatible_override(self, override, message, tmp_path):
        self.make_mhla(output_norm=True).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            self.mhla_class.from_pretrained(tmp_path, mhla=override)

    def test_another_number_of_blocks_is_refused(self, mhla_dir):
        blocks = [max(1, count - 1) for count in self.options["blocks"]]
        with pytest.raises(ValueError, match="are for blocks"):
            self.mhla_class.from_pretrained(mhla_dir, mhla={"blocks": blocks})

    def test_compatible_override(self, mhla_dir):
        stored = self.mhla_class.from_pretrained(mhla_dir)
        with recorded_warnings() as warnings:
            model = self.mhla_class.from_pretrained(mhla_dir, mhla={"resize": "block_size"})
        assert warnings == []
        assert model.config.mhla == {**stored.config.mhla, "resize": "block_size"}
        assert_same_parameters(model, stored)

    @pytest.mark.parametrize("kernel", [3, 5])
    def test_override_may_add_parameters(self, kernel, mhla_dir):
        stored = self.mhla_class.from_pretrained(mhla_dir)
        with recorded_warnings() as warnings:
            model = self.mhla_class.from_pretrained(mhla_dir, mhla={"output_gate": True, "lepe_kernel": kernel})
        assert len(warnings) == 1 and f"{4 * len(model.mhla_layers)} MHLA parameter(s)" in warnings[0]
        assert "leave the model's output as it was" in warnings[0]
        assert_same_parameters(model, stored, only_common=True)
        # Fresh gates and convolutions leave the output as it is, at grids that the blocks do not divide too.
        for size in (0, 1, 2):
            assert relative_error(self.run(model, size), self.run(stored, size)) < 1e-5
        for module in model.mhla_modules().values():
            assert set(module.lepe.weight.shape[2:]) == {kernel}
            torch.nn.init.normal_(module.lepe.weight, std=0.1, generator=torch.Generator().manual_seed(0))
        assert relative_error(self.run(model), self.run(stored)) > 1e-4

    def test_processors_of_all_layers_are_set_together_or_not_at_all(self):
        model = self.make_mhla(layers=[1])
        if not isinstance(model, AttentionMixin):
            pytest.skip("upstream sets the processors of single layers only")
        before = model.attn_processors
        own = f"{self.block_list}.1.{self.attention}.processor"
        for processors in (AttnProcessor(), {**before, own: AttnProcessor()}):
            with pytest.raises(ValueError, match="AttnProcessor would ignore"):
                model.set_attn_processor(processors)
            assert model.attn_processors == before
        for processor in (before[own], AttnProcessor()):
            with pytest.raises(ValueError, match="number of processors 1"):
                model.set_attn_processor({own: processor})
            assert model.attn_processors == before
        processors = dict(before)
        model.set_attn_processor(processors)
        assert processors == before == model.attn_processors

    # Copies and conversion of a loaded model

    def test_state_dict_round_trip(self):
        source, target = self.make_mhla(), self.make_mhla(trained=False)
        assert relative_error(self.run(target), self.run(source)) > 1e-4
        assert target.load_state_dict(source.state_dict()).missing_keys == []
        assert torch.equal(self.run(target), self.run(source))

    def test_deepcopy_is_independent(self):
        model = self.make_mhla()
        expected = self.run(model)
        duplicate = copy.deepcopy(model)
        assert torch.equal(self.run(duplicate), expected)
        for parameter in mhla_parameters(duplicate).values():
            parameter.data.mul_(3.0)
        assert torch.equal(self.run(model), expected)

    def test_pickle(self):
        assert pickle.loads(pickle.dumps(self.mhla_class)) is self.mhla_class
        model = self.make_mhla()
        assert torch.equal(self.run(pickle.loads(pickle.dumps(model))), self.run(model))

    @pytest.mark.smoke
    @pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
    def test_convert_in_place_equals_loading(self, options, ordinary_dir, tmp_path):
        mhla = {**self.options, **options}
        model = self.upstream.from_pretrained(ordinary_dir)
        weight = next(model.parameters())
        converted = convert(model, mhla)
        assert converted is model and type(model) is self.mhla_class and next(model.parameters()) is weight
        assert not any(module.training for module in model.modules())
        loaded = self.mhla_class.from_pretrained(ordinary_dir, mhla=mhla)
        assert_same_parameters(model, loaded)
        assert model.config.mhla == loaded.config.mhla
        torch.testing.assert_close(self.run(model), self.run(loaded))
        model.save_pretrained(tmp_path)
        assert_same_parameters(self.mhla_class.from_pretrained(tmp_path), model)

    def test_convert_in_half_precision(self, ordinary_dir):
        model = self.upstream.from_pretrained(ordinary_dir, torch_dtype=torch.bfloat16)
        convert(model, {**self.options, **OPTION_SETS["everything"]})
        assert_dtypes(model, torch.bfloat16)
        assert_fresh(model)
        assert self.run(model, dtype=torch.bfloat16).isfinite().all()

    def test_failed_conversion_leaves_the_model_alone(self):
        model = self.make(self.upstream)
        keys, expected = set(model.state_dict()), self.run(model, self.upstream_size)
        for mhla in ({"layers": [7]}, {"blocks": [2]}, {"no_such": 1}, {"causal": True, "block_size": [4]}):
            with pytest.raises(ValueError):
                convert(model, mhla)
        assert type(model) is self.upstream and set(model.state_dict()) == keys and "mhla" not in model.config
        assert torch.equal(self.run(model, self.upstream_size), expected)
