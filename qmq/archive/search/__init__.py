"""Finds messages in segments without a broker."""
