# SPDX-License-Identifier: Apache-2.0
"""Gradients and gradient checkpointing: what every MHLA model must do."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

from tests.families.model_case import OPTION_SETS, ModelCase, mhla_parameters, relative_error


class TrainingChecks(ModelCase):
    """Attributes: block_class: Name of the module class that users checkpoint."""

    block_class: str

    def gradients(self, model, sizes=(0,)):
        """Gradients of every parameter after one backward over a forward at each size."""
        model.zero_grad()
        outputs = [self.predict(model, **self.inputs(size)) for size in sizes]
        sum(output.square().mean() for output in outputs).backward()
        return self.gradients_of(model)

    @pytest.mark.smoke
    @pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
    def test_every_parameter_has_a_gradient(self, options):
        # The farthest blocks start with a weight of exactly zero under the default initialisation.
        gradients = self.gradients(self.make_mhla(trained=False, **options).train())
        for name, gradient in gradients.items():
            assert gradient.isfinite().all(), name
            assert (gradient.abs().max() > 0) == (not name.endswith(self.untrained)), name
        for name, gradient in gradients.items():
            if name.endswith("mhla.mixing"):
                assert (gradient != 0).all(), f"{name} has entries that cannot learn"

    def test_gradients_match_finite_differences(self):
        model = self.make_mhla(**OPTION_SETS["everything"]).double()
        inputs = self.inputs(2, dtype=torch.float64)

        def loss():
            return self.predict(model, **inputs).square().mean()

        loss().backward()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in mhla_parameters(model).items():
            direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            direction *= parameter.detach().abs().mean()
            # Norms and time embeddings may be float32 whatever the model's dtype (Wan's are): no smaller step, but
            # differences of fourth order.
            step, differences = 1e-2, []
            for width in (step, 2 * step):
                with torch.no_grad():
                    parameter.add_(direction, alpha=width)
                    above = loss()
                    parameter.sub_(direction, alpha=2 * width)
                    differences.append(above - loss())
                    parameter.add_(direction, alpha=width)
            slope = (8 * differences[0] - differences[1]) / (12 * step)
            torch.testing.assert_close((parameter.grad * direction).sum(), slope, rtol=5e-3, atol=1e-6, msg=name)

    @pytest.mark.smoke
    @pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
    @pytest.mark.parametrize("sizes", [(0,), (0, 1), (2, 0)], ids=["one_grid", "same_tokens", "two_grids"])
    def test_gradient_checkpointing_changes_nothing(self, sizes, reentrant):
        model = self.make_mhla(**OPTION_SETS["everything"]).train()
        expected = self.gradients(model, sizes)
        model.enable_gradient_checkpointing(
            lambda function, *arguments: checkpoint(function, *arguments, use_reentrant=reentrant)
        )
        assert model.is_gradient_checkpointing
        actual = self.gradients(model, sizes)
        assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-5

    def test_default_gradient_checkpointing(self):
        model = self.make_mhla().train()
        expected = self.gradients(model, (0, 1))
        model.enable_gradient_checkpointing()
        actual = self.gradients(model, (0, 1))
        assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-5
        model.disable_gradient_checkpointing()
        assert not model.is_gradient_checkpointing

    def test_checkpoint_wrapper_changes_nothing(self):
        model = self.make_mhla().train()
        expected = self.gradients(model, (0, 1))
        apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == self.block_class)
        assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
        actual = self.gradients(model, (0, 1))
        assert actual.keys() == expected.keys()
        assert max(relative_error(actual[name], expected[name]) for name in expected) < 1e-5

    def test_two_grids_before_one_backward_equal_two_backwards(self):
        model = self.make_mhla().train()
        model.enable_gradient_checkpointing()
        together = self.gradients(model, (0, 1))
        apart = [self.gradients(model, (size,)) for size in (0, 1)]
        for name, gradient in together.items():
            torch.testing.assert_close(gradient, apart[0][name] + apart[1][name], rtol=1e-4, atol=1e-6, msg=name)
        # The two grids do give different gradients, so that mixing them up would show.
        mixing = f"{self.block_list}.0.{self.attention}.mhla.mixing"
        assert relative_error(apart[0][mixing], apart[1][mixing]) > 0.1

    def test_forward_leaves_parameters_and_buffers_alone(self):
        model = self.make_mhla(**OPTION_SETS["everything"]).train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for size in (0, 1, 2):
            model(**self.inputs(size))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_autocast_trains_fp32_weights(self):
        model = self.make_mhla(**OPTION_SETS["authors"]).train()
        expected = self.gradients(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            actual = self.gradients(model)
        assert {gradient.dtype for gradient in actual.values()} == {torch.float32}
        assert all(gradient.isfinite().all() for gradient in actual.values())
        for name in mhla_parameters(model):
            assert name.endswith(self.untrained) or relative_error(actual[name], expected[name]) < 0.1, name

    def test_training_lowers_the_loss(self):
        torch.manual_seed(0)
        model = self.make_mhla(trained=False).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        inputs = self.inputs()
        target = torch.randn(self.predict(model, **inputs).shape, generator=torch.Generator().manual_seed(3))
        losses = []
        for _ in range(6):
            loss = (self.predict(model, **inputs) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.01
