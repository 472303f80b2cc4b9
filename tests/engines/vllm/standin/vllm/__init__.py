# SPDX-License-Identifier: Apache-2.0
"""A minimal model of the parts of vLLM 0.22.1 that foundryd's seams touch, written for tests.

It has the names, parameters and order of calls of the real ones, and none of their code.  Each module says which real
behaviour it stands for.  There is no GPU: tensors are on the CPU, and a graph is a function that is called again.
"""
