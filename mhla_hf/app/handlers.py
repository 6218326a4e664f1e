# SPDX-License-Identifier: Apache-2.0
"""What happens on the page: functions that gradio calls with the values of its inputs."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import gradio
import numpy as np
import torch

from ..utils.compat.gradio import unread_messages
from ..utils.messages import shorten_text
from .generation import Answer, read_request
from .generation import Generator as ModelGenerator
from .mixing import MixingBrowser
from .models import Comparison
from .speed import SpeedMeter
from .work import Control, Progress, WorkStopped, follow


logger = logging.getLogger(__name__)

READY, CANCELLED = "", "Cancelled."
FAILED = "This failed on the server, whose log says why."

# Short videos run slower: they would be over before they are seen.
_FRAMES_PER_SECOND = 16
_SHORT_VIDEO = 33
# Messages about progress that nobody has fetched, five of them a second.
_MOST_UNREAD = 50

Result = TypeVar("Result")


class Handlers:
    """The functions of one application.

    Args:
        comparison: The models.
        generator: Answers requests with them.
        browser: Draws their mixing weights.
        meter: Measures their attention.
    """

    def __init__(
        self, comparison: Comparison, generator: ModelGenerator, browser: MixingBrowser, meter: SpeedMeter
    ) -> None:
        self.comparison, self.generator, self.browser, self.meter = comparison, generator, browser, meter

    def compare(self, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Answers a request with both models: yields status, the original's answer, MHLA's, and their times.

        Raises:
            gradio.Error: If the request is not allowed or fails; one line that says why.
        """
        with _shown_errors():
            request = read_request(self.generator, values)
            yield _status(Progress("Waiting for the machine")), None, None, ""
            answers: dict[str, Answer] = {}
            shown: dict[str, Any] = {}
            with TemporaryDirectory(prefix="mhla-hf-app-") as folder:
                for model in ("original", "mhla"):

                    def work(control: Control, model: str = model) -> Answer:
                        with self._machine(control):
                            return self.generator.generate(model, request, control)

                    answers[model] = yield from _followed(work, 3)
                    shown[model] = self._shown(answers[model], Path(folder) / f"{model}.mp4")
                    if model == "original":
                        yield _status(Progress("MHLA")), shown[model], gradio.skip(), gradio.skip()
                # All of it once more: programs get the last values alone.
                yield READY, shown["original"], shown["mhla"], times(answers, self.comparison.attention)

    def measure(self) -> Iterator[tuple[Any, ...]]:
        """Measures time against length, or shows it again: yields status, plot and table.

        Raises:
            gradio.Error: If that fails.
        """
        with _shown_errors():
            result = yield from _followed(self.meter.measure, 2)
            yield READY, result.picture(), result.table()

    def mixing(self, layer: Any, head: Any, block: Any) -> Any:
        """The picture of a layer's mixing weights.

        Raises:
            gradio.Error: If there is no such layer, head or block.
        """
        with _shown_errors():
            return self.browser.picture(layer, head, block)

    @contextmanager
    def _machine(self, control: Control) -> Iterator[None]:
        """Waits for work that was stopped and has not ended yet."""
        while not self.comparison.lock.acquire(timeout=0.2):
            control.check()
        try:
            yield
        finally:
            self.comparison.lock.release()

    def _shown(self, answer: Answer, path: Path) -> Any:
        """An answer as its component takes it."""
        if self.comparison.kind != "video":
            return answer.value
        from diffusers.utils import export_to_video

        frames = np.asarray(answer.value, dtype=np.float32) / 255
        fps = _FRAMES_PER_SECOND // (2 if len(frames) < _SHORT_VIDEO else 1)
        export_to_video(list(frames), str(path), fps=fps)
        return str(path)


def _followed(work: Callable[[Control], Result], others: int) -> Generator[tuple[Any, ...], None, Result]:
    """Runs work, yields its status beside as many other outputs that stay as they are, and returns its result.

    Work that nobody waits for is stopped.
    """
    rest = (gradio.skip(),) * others
    steps = follow(work, Control())
    try:
        while True:
            yield _status(next(steps)), *rest
            if unread_messages() > _MOST_UNREAD:
                raise WorkStopped
    except StopIteration as done:
        return done.value
    except Exception:
        yield READY, *rest
        raise
    finally:
        # A visitor who cancels or leaves closes this generator at a `yield`, and that one with it.
        steps.close()


def times(answers: dict[str, Answer], attention: str) -> str:
    """Times of both models as Markdown."""
    original, own = answers["original"], answers["mhla"]
    rows = [
        f"| {name} | {answer.seconds:.2f} s | {1e3 * answer.unit_seconds:,.0f} ms |"
        for name, answer in ((attention.capitalize(), original), ("MHLA", own))
    ]
    ratio = own.unit_seconds / original.unit_seconds
    return (
        f"| | total | per {original.unit} |\n|---|---|---|\n" + "\n".join(rows) + "\n\n"
        f"Both start from the same seed. MHLA takes **{ratio:.2f} times as long** for a {original.unit}; "
        "the Speed tab shows how that changes with the length."
    )


def _status(progress: Progress) -> str:
    bar = f'<progress max="{progress.total}" value="{progress.done}"></progress>' if progress.total else ""
    return f'<div class="status">{bar}<span>{html.escape(progress.title)}</span></div>'


@contextmanager
def _shown_errors() -> Iterator[None]:
    """Shows users' mistakes and exhausted memory on the page, and of other errors only that there was one."""
    try:
        yield
    except (ValueError, WorkStopped) as error:
        raise gradio.Error(shorten_text(str(error) or CANCELLED, 300), print_exception=False) from None
    except torch.OutOfMemoryError:
        raise gradio.Error("Not enough memory for this size: ask for a smaller one.", print_exception=False) from None
    except Exception as error:
        logger.exception("A request failed.")
        raise gradio.Error(FAILED, print_exception=False) from error
