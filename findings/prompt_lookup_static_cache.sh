#!/usr/bin/env bash
# transformers 5.24.0: prompt lookup in a static cache ends in an IndexError, although 5.24 is the first that allows it.
#
# `generate(cache_implementation="static")` makes a cache for the prompt and `max_new_tokens`. Near the end a draft of
# `prompt_lookup_num_tokens` is longer than what is left, and its keys are written past the end of the cache. Whether it
# happens depends on the text and its length. A StaticCache made by the caller with room for the draft gives the tokens
# of ordinary decoding. 5.23.0 refuses static caches here in one sentence.
#
# Output seen (CPU, Python 3.11):
#   transformers 5.24.0, prompt lookup in a static cache: IndexError: index_copy_(): index 30 is out of bounds for dimension 2 with size 30
#   transformers 5.24.0, in a StaticCache with room for a draft more: the same tokens
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 2>/dev/null
cat > "$folder/program.py" <<'PROGRAM'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)
model = LlamaForCausalLM(config).eval()
# A model that repeats its last token for ever: drafts are accepted.
for name, parameter in model.named_parameters():
    parameter.data.mul_(0 if "o_proj" in name or "down_proj" in name else 1)
model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 5]])
options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 21, "do_sample": False}
plain = model.generate(ids, **options)
lookup = {**options, "prompt_lookup_num_tokens": 3}
version = transformers.__version__
try:
    model.generate(ids, cache_implementation="static", **lookup)
    print(f"transformers {version}, prompt lookup in a static cache: no error")
except IndexError as error:
    print(f"transformers {version}, prompt lookup in a static cache: IndexError: {str(error).splitlines()[0]}")
roomy = model.generate(ids, cache=StaticCache(config=config, max_cache_len=34), **lookup)
print(f"transformers {version}, in a StaticCache with room for a draft more: {'the same' if torch.equal(plain, roomy) else 'other'} tokens")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null | tee "$folder/output"
grep -qF "prompt lookup in a static cache: IndexError: index_copy_(): index 30 is out of bounds for dimension 2 with size 30" "$folder/output"
grep -qF "in a StaticCache with room for a draft more: the same tokens" "$folder/output"
