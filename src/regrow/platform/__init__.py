"""Platforms: the scheduling verbs for a scheduler that runs on PyTorch and on MindSpore. Imports neither framework."""

from regrow.platform.base import Platform
from regrow.platform.choosing import get_platform
from regrow.platform.on_mindspore import MindSporePlatform
from regrow.platform.on_torch import TorchPlatform

__all__ = ["MindSporePlatform", "Platform", "TorchPlatform", "get_platform"]
