"""The same client for programs without asyncio."""
