"""What is measured of a job, and profiles by arithmetic."""
