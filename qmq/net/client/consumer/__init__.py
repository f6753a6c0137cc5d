"""Consumers: subscriptions, pulls, messages, and the acks and nacks that answer them."""
