"""Measure one work on a running peer."""
