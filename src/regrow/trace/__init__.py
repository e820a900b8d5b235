"""Trace: what regrow does, seen from outside. Listens to events and looks at what is held; must never keep it alive."""

from regrow.trace.recorder import Recorder, record
from regrow.trace.timeline import Timeline

__all__ = ["Recorder", "Timeline", "record"]
