"""The process of a broker: builds store, rules and server, and runs them."""
