# SPDX-License-Identifier: Apache-2.0
"""What has to hold inside an archive beyond its digests, one module for each kind of object."""
