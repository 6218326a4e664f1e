# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(fullgraph=True)`: what every MHLA model must do."""

import pytest
import torch

from tests.models.model_case import OPTION_SETS, ModelCase, relative_error


class CompileChecks(ModelCase):
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    def assert_equal_to_eager(self, model, compiled, sizes):
        """Output and every gradient at each size, one after the other through the same compiled model."""
        for size in sizes:
            results = []
            for function in (model, compiled):
                model.zero_grad()
                output = function(**self.inputs(size)).sample
                output.square().mean().backward()
                results.append((output.detach(), [parameter.grad.clone() for parameter in model.parameters()]))
            (expected, gradients), (actual, compiled_gradients) = results
            assert relative_error(actual, expected) < 1e-5
            for gradient, compiled_gradient in zip(gradients, compiled_gradients):
                assert relative_error(compiled_gradient, gradient) < 1e-4

    @pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
    @pytest.mark.parametrize("dynamic", [None, False], ids=["automatic", "static"])
    def test_traces_without_graph_breaks(self, options, dynamic):
        """Capture and differentiation of the whole graph at three grids; code generation is another test's."""
        model = self.make_mhla(**options)
        compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        self.assert_equal_to_eager(model, compiled, (0, 1, 2))

    def test_compiles_forward_and_backward(self):
        model = self.make_mhla(**OPTION_SETS["authors"], mixing_heads="per_head")
        compiled = torch.compile(model, fullgraph=True, dynamic=False)
        self.assert_equal_to_eager(model, compiled, (0,))

    @pytest.mark.slow
    @pytest.mark.parametrize("options", OPTION_SETS.values(), ids=OPTION_SETS)
    @pytest.mark.parametrize("dynamic", [None, False], ids=["automatic", "static"])
    def test_compiles_at_every_grid(self, options, dynamic):
        model = self.make_mhla(**options)
        self.assert_equal_to_eager(model, torch.compile(model, fullgraph=True, dynamic=dynamic), (0, 1, 2))

    def test_compile_repeated_blocks(self):
        model = self.make_mhla(**OPTION_SETS["default"])
        expected = [self.run(model, size) for size in (0, 2)]
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        for size, output in zip((0, 2), expected):
            torch.testing.assert_close(self.run(model, size), output)

    def test_compiled_with_gradient_checkpointing(self):
        model = self.make_mhla().train()
        model.enable_gradient_checkpointing()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        self.assert_equal_to_eager(model, compiled, (0, 1))
