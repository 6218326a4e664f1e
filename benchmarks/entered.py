# SPDX-License-Identifier: Apache-2.0
"""Files of the package that an action enters: what one reads to follow it from call to result.

python -m benchmarks.entered          # counts
python -m benchmarks.entered --files  # with names

A file is entered when one of its functions is called. What runs when a module is imported (its body, class bodies and
the functions that these call) is not counted. Each action runs in a process by itself, on a tiny model.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any


PACKAGE = Path(__file__).resolve().parents[1] / "mhla_hf"
PIPELINE, BLOCKS = PACKAGE / "assets" / "digits_wan", (5, 4, 4)
"""The pipeline in the package, and blocks for it."""


def first_token(_: Path) -> None:
    """Build a Llama and generate a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import mhla_hf  # noqa: F401

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, mhla={"block_size": 4})
    model = LlamaForCausalLM._from_config(config, attn_implementation="mhla").eval()
    model.generate(torch.arange(10)[None], max_new_tokens=1, do_sample=False)


def video(_: Path) -> None:
    """Load the pipeline of the package with MHLA and generate a video."""
    import mhla_hf

    pipeline = mhla_hf.load_pipeline(str(PIPELINE), mhla={"blocks": BLOCKS})
    pipeline.set_progress_bar_config(disable=True)
    pipeline("a one moves right", height=64, width=64, num_frames=17, num_inference_steps=1)


def convert(folder: Path) -> None:
    """Convert the pipeline of the package to a directory."""
    import mhla_hf

    mhla_hf.convert_pretrained(PIPELINE, folder / "converted", {"blocks": BLOCKS})


def train(folder: Path) -> None:
    """Train the pipeline of the package on digits for two steps, from the command line."""
    from mhla_hf.cli.main import app

    options = "--data digits --samples 4 --max-steps 2 --batch-size 2 --learning-rate 1e-3"
    mhla = ["--mhla", f'{{"blocks": {list(BLOCKS)}}}']
    sys.argv = ["mhla-hf", "train", "wan", str(PIPELINE), str(folder / "run"), *mhla, *options.split()]
    try:
        app()
    except SystemExit as error:
        if error.code:
            raise


ACTIONS = {"first_token": first_token, "load_pipeline": video, "convert": convert, "train": train}


def imports_something(frame: FrameType | None) -> bool:
    """Tell whether a frame runs on behalf of a module body of the package."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            return True
        frame = frame.f_back
    return False


def entered(action: Callable[[Path], None]) -> list[str]:
    """Run an action and return the files that it entered."""
    files: set[str] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename in files or not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_flags & inspect.CO_OPTIMIZED and not imports_something(frame):
            files.add(code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        threading.setprofile(record)
        sys.setprofile(record)
        try:
            action(Path(folder))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(str(Path(file).relative_to(PACKAGE)) for file in files)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("actions", nargs="*", choices=[*ACTIONS, []], help="all by default")
    parser.add_argument("--files", action="store_true", help="name the files")
    given = parser.parse_args()
    for name in given.actions or ACTIONS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            files = pool.apply(entered, (ACTIONS[name],))
        print(f"{name:16}{len(files):4}", *(files if given.files else []), sep="\n  " if given.files else "")


if __name__ == "__main__":
    main()
