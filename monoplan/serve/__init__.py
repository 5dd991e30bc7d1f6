"""Many users on one plan: the engine that keeps it full, and the server in front of it."""

ALIAS = "monoplan"  # a name that the model of every server answers to
