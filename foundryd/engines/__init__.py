# SPDX-License-Identifier: Apache-2.0
"""Adapters: what an engine or framework needs so that its graphs are captured and restored."""
