# SPDX-License-Identifier: Apache-2.0
"""What ComfyUI does with a folder of nodes and a workflow, by its documentation.

ComfyUI cannot be installed from PyPI. This loads a folder as a package by its path, checks and runs workflows in the
format of its API, keeps outputs whose inputs have not changed, and has those functions of its modules that nodes call.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import threading
import types
from pathlib import Path
from typing import Any

import torch


class Interrupted(BaseException):
    """Raised in a node after the user has cancelled; not an `Exception` in newer versions of ComfyUI."""


class ComfyUI:
    """One installation.

    Args:
        root: Its directory; `models/diffusers` and `output` are made there.
        monkeypatch: Puts its modules into `sys.modules`.

    Attributes:
        node_classes: Node classes by name.
        display_names: Their names in the menu.
        progress: Steps reported by the progress bars, `(value, total)`.
        interrupt_after: Number of steps after which the user cancels.
    """

    def __init__(self, root: Path, monkeypatch: Any) -> None:
        self.root = root
        self.models, self.output = root / "models" / "diffusers", root / "output"
        self.models.mkdir(parents=True)
        self.output.mkdir()
        self.node_classes: dict[str, Any] = {}
        self.display_names: dict[str, str] = {}
        self.progress: list[tuple[int, int]] = []
        self.interrupt_after: int | None = None
        for name, module in self.modules().items():
            monkeypatch.setitem(sys.modules, name, module)

    def modules(self) -> dict[str, types.ModuleType]:
        installation = self

        class ProgressBar:
            def __init__(self, total: int, node_id: str | None = None) -> None:
                self.total = total

            def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
                installation.progress.append((value, total or self.total))

        def throw_exception_if_processing_interrupted() -> None:
            if installation.interrupt_after is not None and len(installation.progress) >= installation.interrupt_after:
                raise Interrupted

        found = {name: types.ModuleType(name) for name in ("comfy", "folder_paths")}
        for name in ("cli_args", "model_management", "utils"):
            found[f"comfy.{name}"] = types.ModuleType(f"comfy.{name}")
            setattr(found["comfy"], name, found[f"comfy.{name}"])
        found["comfy.cli_args"].args = types.SimpleNamespace(disable_metadata=False)
        found["comfy.utils"].ProgressBar = ProgressBar
        management = found["comfy.model_management"]
        management.get_torch_device = lambda: torch.device("cpu")
        management.should_use_bf16 = lambda device=None: True
        management.unload_all_models = management.soft_empty_cache = lambda: None
        management.throw_exception_if_processing_interrupted = throw_exception_if_processing_interrupted
        paths = found["folder_paths"]
        paths.get_folder_paths = lambda name: [str(self.root / "models" / name)]
        paths.get_output_directory = lambda: str(self.output)
        paths.get_save_image_path = self.get_save_image_path
        return found

    def get_save_image_path(self, prefix: str, folder: str, width: int = 0, height: int = 0) -> tuple:
        subfolder, name = str(Path(prefix).parent), Path(prefix).name
        target = (Path(folder) / subfolder).resolve()
        if not target.is_relative_to(Path(folder).resolve()):
            raise Exception("Saving image outside the output folder is not allowed.")
        target.mkdir(parents=True, exist_ok=True)
        numbers = [int(file.name[len(name) + 1 :].split("_")[0]) for file in target.glob(f"{name}_*_.*")]
        return str(target), name, max(numbers, default=0) + 1, "" if subfolder == "." else subfolder, prefix

    def load_custom_node(self, folder: Path) -> None:
        """Imports a folder below `custom_nodes` under a name made of its path, and takes its nodes."""
        name = str(folder).replace(".", "_x_")
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            for part in [part for part in sys.modules if part.split(".")[0] == name]:
                del sys.modules[part]
        self.node_classes.update(module.NODE_CLASS_MAPPINGS)
        self.display_names.update(module.NODE_DISPLAY_NAME_MAPPINGS)

    def validate(self, workflow: dict[str, Any]) -> list[str]:
        """Checks a workflow as ComfyUI does before it runs one."""
        errors = []
        for key, node in workflow.items():
            node_class = self.node_classes[node["class_type"]]
            declared = node_class.INPUT_TYPES()
            errors += [f"{key}: {name} is missing" for name in declared["required"] if name not in node["inputs"]]
            known = {**declared["required"], **declared.get("optional", {})}
            for name, value in node["inputs"].items():
                kind, options = (*known[name], {})[:2]
                if isinstance(value, list):
                    origin = self.node_classes[workflow[value[0]]["class_type"]]
                    if origin.RETURN_TYPES[value[1]] != kind:
                        errors.append(f"{key}: {name} is not a {kind}")
                elif isinstance(kind, list):
                    if value not in kind:
                        errors.append(f"{key}: {name} is not one of {kind}")
                elif not isinstance(value, {"STRING": str, "INT": int, "FLOAT": (int, float)}[kind]):
                    errors.append(f"{key}: {name} is not a {kind}")
                elif kind != "STRING" and not options["min"] <= value <= options["max"]:
                    errors.append(f"{key}: {name} is out of range")
        return errors

    def run(self, workflow: dict[str, Any]) -> dict[str, Any]:
        """Runs a workflow from its output nodes, in a thread and without gradients, as ComfyUI does.

        Returns:
            What every node returned, by its key.

        Raises:
            BaseException: What a node raised.
        """
        assert self.validate(json.loads(json.dumps(workflow))) == []
        self.progress = []
        outputs: dict[str, Any] = {}
        raised: list[BaseException] = []

        def work() -> None:
            try:
                with torch.inference_mode():
                    for key, node in workflow.items():
                        if getattr(self.node_classes[node["class_type"]], "OUTPUT_NODE", False):
                            self.run_node(key, workflow, outputs)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]
        return outputs

    def run_node(self, key: str, workflow: dict[str, Any], outputs: dict[str, Any]) -> Any:
        if key in outputs:
            return outputs[key]
        node = workflow[key]
        node_class = self.node_classes[node["class_type"]]
        values = {
            name: self.results(self.run_node(value[0], workflow, outputs))[value[1]]
            if isinstance(value, list)
            else value
            for name, value in node["inputs"].items()
        }
        hidden = {"PROMPT": workflow, "EXTRA_PNGINFO": {"workflow": {"nodes": []}}}
        declared = node_class.INPUT_TYPES().get("hidden", {})
        values.update({name: hidden[kind] for name, kind in declared.items()})
        outputs[key] = getattr(node_class(), node_class.FUNCTION)(**values)
        return outputs[key]

    @staticmethod
    def results(returned: Any) -> tuple:
        return returned.get("result", ()) if isinstance(returned, dict) else returned


def check_contract(node_class: Any) -> None:
    """Fails unless a class is a node as ComfyUI's documentation describes it."""
    declared = node_class.INPUT_TYPES()
    assert "required" in declared and set(declared) <= {"required", "optional", "hidden"}
    json.dumps(declared)
    for inputs in (declared["required"], declared.get("optional", {})):
        for kind, *options in inputs.values():
            assert isinstance(kind, (str, list)) and len(options) <= 1
            assert all(isinstance(option, dict) for option in options)
    assert isinstance(node_class.RETURN_TYPES, tuple) and all(
        isinstance(kind, str) for kind in node_class.RETURN_TYPES
    )
    assert len(getattr(node_class, "RETURN_NAMES", node_class.RETURN_TYPES)) == len(node_class.RETURN_TYPES)
    assert isinstance(node_class.CATEGORY, str) and node_class.CATEGORY
    assert node_class.RETURN_TYPES or node_class.OUTPUT_NODE
    parameters = inspect.signature(getattr(node_class, node_class.FUNCTION)).parameters
    names = [name for inputs in declared.values() for name in inputs]
    assert list(parameters)[1:] == names
    for name in [*declared.get("optional", {}), *declared.get("hidden", {})]:
        assert parameters[name].default is not inspect.Parameter.empty
