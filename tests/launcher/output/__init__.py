"""What ranks write and read."""
