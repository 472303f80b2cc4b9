# SPDX-License-Identifier: Apache-2.0
"""PyTorch: ``GraphSet`` for programs that use ``torch.cuda``.

::

    import foundryd.engines.torch as foundry

    graphs = foundry.GraphSet.from_env()                 # before CUDA is initialised
    torch.distributed.init_process_group("nccl", device_id=graphs.device)
    with graphs.arena("weights"):
        model = Model().to(graphs.device)
    graphs.bind("model", model)
    with graphs.arena("io"):
        tokens = torch.zeros(64, dtype=torch.int64, device=graphs.device)
    graphs.bind("tokens", tokens)
    graph, logits = graphs.capture_or_restore(("decode", 64), lambda: model(tokens))
    graphs.finish()
    graph.replay()
"""

from foundryd.engines.torch.graphset import GraphSet
from foundryd.session.policy import RestorePolicy

__all__ = ["GraphSet", "RestorePolicy"]
