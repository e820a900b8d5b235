"""The ways to run one checkpointed call. They must never import each other."""
