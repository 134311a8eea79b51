"""What a plan is worth, and how long until the next loss."""
