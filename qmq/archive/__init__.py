"""History: segments as they are read without a broker, and the archive that holds copies of them."""
