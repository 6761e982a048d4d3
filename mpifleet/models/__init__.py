"""Models of the example programs, in plain torch."""
