# SPDX-License-Identifier: Apache-2.0
"""vLLM: graphs from an archive, without a change of vLLM.  docs/vllm.md says how it is used.

``plugin`` is what vLLM loads, ``versions`` knows which seams fit which vLLM, ``v0_22`` has those of one range, and
``adapter`` is a worker's side, which knows nothing of vLLM's own objects.
"""
