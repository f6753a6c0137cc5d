"""Messages to hand out again, and dead letters."""
