"""Commands that speak SQL: queries, imports of queues that lie in tables, and the outbox."""
