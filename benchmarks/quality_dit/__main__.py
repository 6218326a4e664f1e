# SPDX-License-Identifier: Apache-2.0
"""Quality of small DiTs with softmax, linear attention and MHLA: `mhla-hf bench quality`."""

from mhla_hf.cli.bench import quality_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(quality_command)
