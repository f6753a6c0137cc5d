"""How each broker is installed, started on loopback, and stopped. One file a broker."""
