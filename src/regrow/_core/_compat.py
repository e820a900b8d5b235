"""Private torch names that only looking on needs, as in `compat`. Must never be needed by a replay nobody looks at."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from regrow._core.private import ask

# The code that calls a module's forward: it is found on the stack, to say in which module an operator runs.
# Deleted by a public way to ask which module is running.
module_call: Any = ask("torch.nn", "Module._call_impl.__code__", "messages name the module of an operator")

# Who keeps a storage alive, and which one it is. Deleted by a public count of users, and an identity.
storage_users: Callable[[int], int] = ask(
    "torch._C", "_storage_Use_Count", "reports count what a replay alone keeps alive"
)
storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# Whether ranges go anywhere: to make one costs more than all events of a replay. Deleted by a public query.
profiler_runs: Callable[[], bool] = ask(
    "torch._C._autograd", "_profiler_enabled", "replays are ranges for the profiler"
)
