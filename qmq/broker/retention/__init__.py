"""Retention: drop old segments, and carry forward what groups still need."""
