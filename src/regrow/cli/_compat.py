"""The private torch names of the command line, and why. Must never hold behaviour of ours.

The demo cuts backward into dx and dw with torch's own two functions, those that its zero-bubble schedules call, so that
what it shows is what torch's schedules do. They have no public name. Deleted by a public split backward, in torch or
in regrow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    from torch.distributed.pipelining import _backward as _torch

    stage_backward_input: Callable[..., Any] = _torch.stage_backward_input
    stage_backward_weight: Callable[..., Any] = _torch.stage_backward_weight
except (ImportError, AttributeError) as error:
    raise ImportError(
        "the demo needs stage_backward_input and stage_backward_weight of torch.distributed.pipelining._backward "
        f"(they cut backward into dx and dw), which torch {torch.__version__} does not have: {error}. "
        "Install a torch version in the range that regrow declares, or report this version.",
        name=__name__,
    ) from error
