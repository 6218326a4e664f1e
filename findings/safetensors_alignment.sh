#!/usr/bin/env bash
# safetensors 0.8.0 and torch 2.13.0 on a CPU: the weights that are loaded are equal bit by bit, the output is not.
#
# `load_file` maps the file, and a tensor begins where the ones before it end: at any multiple of its element size. CPU
# products of a matrix and one row add up in another order where the matrix does not begin at a multiple of 16 bytes, so
# a linear layer whose weight lies behind a tensor of 8 bytes gives other last bits than before it was saved, for the
# embedding of a time step for example. A clone of the loaded weight gives the former ones. Any model with a tensor of
# a size that is no multiple of 16 bytes is affected: comparisons after a reload need a tolerance or a clone.
#
# Output seen (x86-64, Python 3.11; the size of the difference depends on the processor):
#   loaded weight: equal, address 8 bytes past a multiple of 16, output differs: True
#   its clone: equal, address 0 bytes past a multiple of 16, output differs: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy==2.4.6 packaging==26.3 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import sys

import torch
from safetensors.torch import load_file, save_file

torch.manual_seed(0)
torch.set_num_threads(1)
differs = {}
for width in (24, 48, 96, 160, 320):
    weight, inputs = torch.randn(width, width), torch.randn(1, width)
    expected = inputs @ weight.T
    # Tensors are sorted by size of their elements and name.
    save_file({"a": torch.zeros(2), "b": weight}, sys.argv[1])
    loaded = load_file(sys.argv[1])["b"]
    for name, found in (("loaded weight", loaded), ("its clone", loaded.clone())):
        assert torch.equal(found, weight)
        address, other = found.data_ptr() % 16, not torch.equal(inputs @ found.T, expected)
        differs.setdefault((name, address), []).append(other)
for (name, address), others in differs.items():
    print(f"{name}: equal, address {address} bytes past a multiple of 16, output differs: {any(others)}")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder/weights.safetensors" | tee "$folder/output"
grep -qF "loaded weight: equal, address 8 bytes past a multiple of 16, output differs: True" "$folder/output"
grep -qF "its clone: equal, address 0 bytes past a multiple of 16, output differs: False" "$folder/output"
