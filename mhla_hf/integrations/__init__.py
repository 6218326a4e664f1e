# SPDX-License-Identifier: Apache-2.0
"""Hooks into transformers, diffusers and peft. Their private parts are reached through `mhla_hf.utils.compat`."""
