"""The MindSpore backend: MindSpore's own recompute, with regrow's checks on top. Must never import torch."""
