"""Client libraries: how each sends and consumes. One file a library; each is imported by workers only."""
