"""Who is waited for, and how long."""
