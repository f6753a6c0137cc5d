"""Pulls: choose messages, hand them out, wait, take back."""
