"""A start's own part of the rules: the state in a checkpoint, and the pull log since."""
