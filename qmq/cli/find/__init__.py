"""Commands that find stored messages."""
