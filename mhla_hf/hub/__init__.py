# SPDX-License-Identifier: Apache-2.0
"""Sharing models: checks of directories, model cards, and pushing to the Hub."""
