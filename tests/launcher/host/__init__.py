"""What the system offers."""
