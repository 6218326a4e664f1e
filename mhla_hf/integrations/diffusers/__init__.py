# SPDX-License-Identifier: Apache-2.0
"""MHLA model classes in the namespace and the loaders of diffusers."""
