"""Models that the project makes itself, as folders like any other."""
