# SPDX-License-Identifier: Apache-2.0
"""A file for each family of diffusion models: its MHLA classes, its objective and its example inputs."""
