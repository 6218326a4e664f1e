#!/usr/bin/env bash
# diffusers 0.42.1 with accelerate 1.15.0: while one thread loads a model, modules that other threads build have no data.
#
# `from_pretrained` builds the model on the meta device by accelerate's `init_empty_weights`, which exchanges
# `torch.nn.Module.register_parameter` for the whole process. A layer that another thread builds meanwhile becomes meta
# too, and stays so. transformers uses torch's device context, which is a thread's own, and has no such effect. Programs
# that load pipelines in several threads have to take a lock around it, or pass `low_cpu_mem_usage=False`.
#
# Output seen (CPU, Python 3.11; the share differs from run to run):
#   diffusers 0.42.1: 7298 of 18992 linear layers that another thread built have no data
#   transformers 5.23.0: 0 of 32788
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 diffusers==0.42.1 \
    transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import sys
import threading
from importlib.metadata import version

import torch
from diffusers import DiTTransformer2DModel
from transformers import BertConfig, BertModel


def count(model, folder):
    """Linear layers that this thread builds, and those of them without data, while another one loads a model."""
    model.save_pretrained(folder)
    done = threading.Event()

    def load():
        for _ in range(20):
            type(model).from_pretrained(folder)
        done.set()

    thread = threading.Thread(target=load)
    thread.start()
    built = empty = 0
    while not done.is_set():
        built += 1
        empty += torch.nn.Linear(4, 4).weight.is_meta
    thread.join()
    return built, empty


dit = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=12, sample_size=8)
bert = BertModel(BertConfig(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=12))
built, empty = count(dit, f"{sys.argv[1]}/dit")
others, others_empty = count(bert, f"{sys.argv[1]}/bert")
print(f"diffusers {version('diffusers')}: {empty} of {built} linear layers that another thread built have no data")
print(f"transformers {version('transformers')}: {others_empty} of {others}")
print(f"as described: {empty > 0 and others_empty == 0}")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2>/dev/null | tee "$folder/output"
grep -qF "as described: True" "$folder/output"
