"""The border of the broker's rules: commands in, effects out, limits and metrics."""
