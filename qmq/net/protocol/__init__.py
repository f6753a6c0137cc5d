"""The protocol: frames, and the types that clients and brokers exchange. Without I/O."""
