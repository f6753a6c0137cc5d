"""Dropping old segments, and carrying forward what groups still need."""
