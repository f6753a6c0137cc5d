"""Consuming: subscriptions, pulls, messages and what becomes of them."""
