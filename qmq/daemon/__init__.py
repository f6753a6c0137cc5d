"""The process of a broker: builds the store, the broker and the server, and runs them."""
