"""What a start takes over: the checkpoint, the pull log since, and records that are lost."""
