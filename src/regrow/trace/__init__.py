"""Trace: what regrow does, seen from outside. Listens to events and looks at what is held; must never keep it alive."""
