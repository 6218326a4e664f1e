# SPDX-License-Identifier: Apache-2.0
"""`python -m mhla_hf` is `mhla-hf`."""

from .cli.main import app


app(prog_name="mhla-hf")
