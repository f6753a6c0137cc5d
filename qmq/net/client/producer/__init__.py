"""The producer: messages collect into batches, which are sent, retried, and end stored or failed."""
