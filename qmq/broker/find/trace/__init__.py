"""Traces: what has become of one message in each group, by the state that the broker acts on, and by the pull log."""
