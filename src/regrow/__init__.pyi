from regrow import policies as policies
from regrow import trace as trace
from regrow._core.ambient import register_ambient as register_ambient
from regrow._core.faults import CheckpointError as CheckpointError
from regrow._core.faults import FrameBusyError as FrameBusyError
from regrow._core.faults import InputChangedError as InputChangedError
from regrow._core.faults import PlaceholderError as PlaceholderError
from regrow._core.faults import RegionError as RegionError
from regrow._core.faults import ReplayMismatchError as ReplayMismatchError
from regrow._core.faults import StateChangedError as StateChangedError
from regrow._core.faults import ValueChangedError as ValueChangedError
from regrow._core.frame import Handle as Handle
from regrow._core.replaying import is_recomputing as is_recomputing
from regrow._core.scope import ReentrantHandle as ReentrantHandle
from regrow._core.selective import create_selective_checkpoint_contexts as create_selective_checkpoint_contexts
from regrow.call import checkpoint as checkpoint
from regrow.errors import RegrowError as RegrowError
from regrow.scheduling import clear_recompute_session as clear_recompute_session
from regrow.scheduling import recompute_handle as recompute_handle
from regrow.scheduling import recompute_handle_collector_ctx as recompute_handle_collector_ctx
from regrow.scheduling import recompute_session_ctx as recompute_session_ctx
from regrow.scheduling import reentrant_checkpoint_scope as reentrant_checkpoint_scope
from regrow.trace.graph import saved_tensors_report as saved_tensors_report
from regrow.trace.holdings import memory_report as memory_report
from regrow.trace.ledger import ledger as ledger
from regrow.wrappers import apply_checkpointing as apply_checkpointing
from regrow.wrappers import checkpoint_exclude_wrapper as checkpoint_exclude_wrapper
from regrow.wrappers import checkpoint_wrapper as checkpoint_wrapper
from regrow.wrappers import save_region as save_region

__all__: list[str]
__version__: str
