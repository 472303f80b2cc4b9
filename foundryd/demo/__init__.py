# SPDX-License-Identifier: Apache-2.0
"""A small mixture-of-experts decode engine on ``cuda.bindings``, to capture and to restore.

``config`` says what to run, ``weights`` and ``numerics`` make the numbers, ``device``, ``images`` and ``nccl`` are thin
ways to the driver, ``model`` is one decode step, ``engine`` one rank, ``worker`` its process, ``launch`` a world,
``rendezvous`` how they meet, and ``reference`` the tokens that must come out.
"""
