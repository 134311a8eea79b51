"""The job's log and folder."""
