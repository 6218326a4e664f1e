#!/usr/bin/env bash
# optimum-quanto 0.2.7: weights that are all zero become NaN as float8, and stay zero as int8.
#
# The scale of a channel is its largest weight over the largest float8 number: 0 for a channel of zeros, which is then
# divided by. Freshly added gates, adapters and residual projections start at zero, so a model that is quantised before
# they are trained returns NaN. `QuantoConfig("float8", modules_to_not_convert=[...])` of diffusers leaves them out.
#
# Output seen (CPU, Python 3.11):
#   optimum-quanto 0.2.7: zero weights as int8: finite True, as float8: finite False; other weights as float8: finite True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 optimum-quanto==0.2.7 numpy==2.4.6 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
from importlib.metadata import version

import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize


def is_finite(kind, start: float) -> bool:
    """Whether a quantised linear layer with weights around `start` times a random draw computes finite numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(start)
    quantize(model, weights=kind)
    freeze(model)
    with torch.no_grad():
        return bool(model(torch.ones(1, 32)).isfinite().all())


print(
    f"optimum-quanto {version('optimum-quanto')}: zero weights as int8: finite {is_finite(qint8, 0.0)}, "
    f"as float8: finite {is_finite(qfloat8, 0.0)}; other weights as float8: finite {is_finite(qfloat8, 1.0)}"
)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/output"
grep -qF "zero weights as int8: finite True, as float8: finite False; other weights as float8: finite True" "$folder/output"
