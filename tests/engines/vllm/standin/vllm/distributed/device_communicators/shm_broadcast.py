# SPDX-License-Identifier: Apache-2.0
"""Stands for the message queue in shared memory, whose constructor waits for every reader."""


class MessageQueue:
    @staticmethod
    def create_from_process_group(
        pg, max_chunk_bytes, max_chunks, writer_rank=0, external_writer_handle=None, blocking=True
    ):
        raise AssertionError("a queue without readers would wait for ever")
