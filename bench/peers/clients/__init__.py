"""How each client library sends and consumes. One file a library, which only workers import."""
