"""What every engine shares. Must never import an engine."""
