"""The types at the border of the rules: commands in, effects out, limits and metrics."""
