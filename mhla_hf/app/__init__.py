# SPDX-License-Identifier: Apache-2.0
"""A web application that compares MHLA with the original attention."""
