# SPDX-License-Identifier: Apache-2.0
"""The exported kernel: what is in its folder, and that `kernels` loads it from there and from a Hub."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from conversion.hub_kernel import export_kernel
from mhla_hf import BlockLayout
from tests import ROOT
from tests.hub_server import HubServer
from tests.ops.reference import make_inputs, output_and_gradients


pytest.importorskip("kernels")

# As in processes where the package is not installed.
WITHOUT_PACKAGE = "import sys; sys.modules['mhla_hf'] = None\n"
# Arguments of layouts.
GRID, SEQUENCE = ((3, 3, 5), (1, 2, 2)), ((11,), None, (4,))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The folder of the kernel."""
    folder = tmp_path_factory.mktemp("kernel") / "mhla"
    export_kernel(folder, repo_id="user/mhla")
    return folder


def run(*command, cwd, **variables) -> str:
    """Runs a command far from the repository and returns what it wrote."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1", **variables}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_folder_is_what_the_library_and_its_builder_expect(kernel):
    from kernels import Metadata
    from kernels._rust import Build, Digest, DigestAlgorithm

    assert [str(backend) for backend in Build.open(kernel).general.backends] == ["cpu", "cuda"]
    sources = files(kernel / "torch-ext" / "mhla")
    for backend in ("cpu", "cuda"):
        build = kernel / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(build / "metadata.json")
        assert (str(metadata.name), metadata.license, metadata.version) == ("mhla", "Apache-2.0", 0)
        assert str(metadata.backend.backend_type) == backend
        assert re.fullmatch(rf"_mhla_{backend}_[0-9a-f]{{10}}", metadata.id)
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, build))
        built = files(build)
        assert built.keys() - sources.keys() == {"_ops.py", "metadata.json", "mhla/__init__.py"}
        assert {path: built[path] for path in sources} == sources
    assert "ops/triton/fused_gradient.py" in sources and "config.py" not in sources
    assert not any(
        re.search(rb"import mhla_hf|from mhla_hf|mhla_hf::|ops\.mhla_hf", text) for text in sources.values()
    )
    card = (kernel / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n") and "OWNER" not in card
    assert (kernel / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_other_sources_give_another_namespace(kernel, tmp_path):
    package = tmp_path / "package"
    shutil.copytree(ROOT / "mhla_hf", package, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    with (package / "ops/forms.py").open("a") as file:
        file.write("# Another revision.\n")
    export_kernel(tmp_path / "other", repo_id="user/mhla", package=package)
    program = f"""
        from pathlib import Path
        import torch
        from kernels import get_local_kernel
        folders = ({str(kernel)!r}, {str(kernel / "build/torch-cuda")!r}, {str(tmp_path / "other")!r})
        loaded = [get_local_kernel(Path(folder)) for folder in folders]
        assert len({{module.__name__ for module in loaded}}) == len({{module.BlockLayout for module in loaded}}) == 3
        [module.fused_mhla_attention for module in loaded]  # registers its operators
        print(*torch._C._dispatch_get_all_op_names())
    """
    namespaces = run(sys.executable, "-c", WITHOUT_PACKAGE + textwrap.dedent(program), cwd=tmp_path)
    registered = [set(re.findall(rf"{name}::(\w+)", namespaces)) for name in set(re.findall(r"_mhla_\w+", namespaces))]
    assert len(registered) == 3 and registered[0] == registered[1] == registered[2]
    assert registered[0] >= {"block_attention_backward", "fused_attention", "fused_attention_backward"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """A file with inputs, and what the package makes of them."""
    saved = {}
    for name, layout in {"grid": BlockLayout(*GRID), "causal": BlockLayout(*SEQUENCE)}.items():
        inputs = make_inputs(layout, dtype=torch.float32)
        results = output_and_gradients(inputs, layout, causal=name == "causal", backend="torch")
        saved[name] = {"inputs": inputs, "results": results}
    path = tmp_path_factory.mktemp("expected") / "results.pt"
    torch.save(saved, path)
    return path


# Computes what `expected` has by some backend, in `results`.
COMPUTE = """
    from pathlib import Path
    import torch
    from kernels import get_local_kernel

    mhla = get_local_kernel(Path({kernel!r}))
    saved = torch.load({expected!r}, weights_only=True)
    GRID, SEQUENCE = {grid}, {sequence}
    layouts = {{"grid": mhla.BlockLayout(*GRID), "causal": mhla.BlockLayout(*SEQUENCE)}}

    def compute(attend, name, layout, **options):
        inputs = {{key: value.detach().requires_grad_() for key, value in saved[name]["inputs"].items()}}
        output = attend(**inputs, layout=layout, causal=name == "causal", **options)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        gradients = torch.autograd.grad(output, list(inputs.values()), cotangent.to(output.dtype))
        return [output, *gradients]
"""


def compute(kernel: Path, expected: Path, program: str) -> str:
    values = {"kernel": str(kernel), "expected": str(expected), "grid": GRID, "sequence": SEQUENCE}
    return textwrap.dedent(COMPUTE.format(**values)) + textwrap.dedent(program)


@pytest.mark.slow
def test_loads_without_the_package_and_equals_it(kernel, expected, tmp_path):
    program = """
        for name, layout in layouts.items():
            for attend in (mhla.mhla_attention, torch.compile(mhla.mhla_attention, fullgraph=True, backend="eager")):
                for actual, wanted in zip(compute(attend, name, layout), saved[name]["results"].values(), strict=True):
                    assert torch.equal(actual, wanted), name
        from importlib import import_module
        for module in (mhla, mhla.ops, import_module(mhla.__name__ + ".ops.triton")):
            for name in module.__all__:
                getattr(module, name)
        assert sys.modules["mhla_hf"] is None and not [name for name in sys.modules if name.startswith("mhla_hf.")]
    """
    run(sys.executable, "-c", WITHOUT_PACKAGE + compute(kernel, expected, program), cwd=tmp_path)


@pytest.mark.slow
def test_interpreted_beside_the_package(kernel, expected, tmp_path):
    program = """
        import mhla_hf
        from mhla_hf.ops.triton import fused_mhla_attention

        assert mhla.mhla_attention is not mhla_hf.mhla_attention
        packages_layouts = {"grid": mhla_hf.BlockLayout(*GRID), "causal": mhla_hf.BlockLayout(*SEQUENCE)}
        for name, layout in layouts.items():
            kernels = compute(mhla.mhla_attention, name, layout, backend="triton")
            packages = compute(mhla_hf.mhla_attention, name, packages_layouts[name], backend="triton")
            for actual, package, wanted in zip(kernels, packages, saved[name]["results"].values(), strict=True):
                assert torch.equal(actual, package), name
                torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
        layout = layouts["grid"]
        tokens = torch.randn(3, 1, layout.num_tokens, 2, 16)
        weights = torch.rand(4, 4)
        options = {"feature_map": "relu", "feature_map_eps": 0.0, "normalizer": "query", "eps": 1e-6, "scaling": 1.0}
        fused = mhla.fused_mhla_attention(*tokens, weights, layout, **options)
        packages = fused_mhla_attention(*tokens, weights, packages_layouts["grid"], **options)
        assert torch.equal(fused, packages)
    """
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run(sys.executable, "-c", compute(kernel, expected, program), cwd=tmp_path, **variables)


@pytest.mark.slow
def test_its_own_tests_pass(kernel, tmp_path):
    plugin = tmp_path / "no_package.py"
    plugin.write_text(WITHOUT_PACKAGE)
    options = ("-p", "no_package", "-p", "no:cacheprovider", "-q", "-c", os.devnull, "--rootdir", str(kernel))
    variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tmp_path)}
    output = run(sys.executable, "-m", "pytest", *options, str(kernel / "tests"), cwd=tmp_path, **variables)
    assert re.search(r"^13 passed", output, re.MULTILINE), output


@pytest.mark.slow
def test_commands_of_the_documentation_publish_it_and_the_card_uses_it(kernel, tmp_path):
    page = (ROOT / "docs" / "kernels.md").read_text().partition("## As a kernel on the Hub")[2]
    commands = [shlex.split(line) for line in re.findall(r"^hf upload .*$", page.replace("\\\n", " "), re.MULTILINE)]
    assert commands
    card = re.findall(r"```python\n(.*?)```", (kernel / "README.md").read_text(), re.DOTALL)
    assert len(card) == 3
    (tmp_path / "mhla-kernel").symlink_to(kernel)
    with HubServer() as hub:
        variables = hub.environment(tmp_path / "home")
        for command in commands:
            arguments = [part.replace("you/mhla", "user/mhla") for part in command[1:]]
            run(str(Path(sys.executable).with_name("hf")), *arguments, cwd=tmp_path, **variables)
        assert hub.repositories["user/mhla"].branches == ["main", "v0"]
        assert hub.repositories["user/mhla"].files == {"README.md": (kernel / "README.md").read_bytes()}
        uploaded = hub.repositories["user/mhla"].files_at("v0")
        assert {path: uploaded[path] for path in files(kernel)} == files(kernel)
        # Without telemetry, `kernels` 0.17 makes a header that its own client refuses.
        variables["HF_HUB_DISABLE_TELEMETRY"] = "0"
        run(sys.executable, "-c", WITHOUT_PACKAGE + "".join(card), cwd=tmp_path, **variables)
        assert not [path for _, path in hub.unknown if "user/mhla" in path]


@pytest.mark.slow
def test_replaces_its_own_folder_alone(tmp_path):
    folder = tmp_path / "kernel"
    export_kernel(folder)
    (folder / "tests" / "__pycache__").mkdir()
    (folder / "torch-ext" / "stale.py").write_text("")
    export_kernel(folder, repo_id="user/other-name")
    assert not (folder / "torch-ext" / "stale.py").exists() and (folder / "torch-ext" / "other_name").is_dir()
    (folder / ".git").mkdir()
    with pytest.raises(ValueError, match=r"kernel has \.git beside the kernel that is to be replaced"):
        export_kernel(folder)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "build.toml").write_text("[general]\n")
    with pytest.raises(ValueError, match="foreign"):
        export_kernel(foreign)
    assert files(foreign) == {"build.toml": b"[general]\n"}


def test_command_says_one_line_for_a_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "conversion.hub_kernel", str(tmp_path / "file")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and re.fullmatch(r"error: .*file.*\n", result.stderr), result.stderr
