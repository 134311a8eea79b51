"""What decides, without processes."""
