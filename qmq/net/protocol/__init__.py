"""The bytes of frames, without I/O."""
