"""Several agents of a job."""
