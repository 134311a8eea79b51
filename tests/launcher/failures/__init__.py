"""Which failure came first."""
