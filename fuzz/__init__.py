"""Coverage-guided fuzzing: bytes that nobody meant, into everything that reads bytes. `make fuzz` runs it.

A target takes any bytes, makes of them what an untrusted client (or a bad disk) could, and hands that to the real code.
It raises when anything but the errors of QMQ comes out, or when what must hold afterwards does not.
"""
