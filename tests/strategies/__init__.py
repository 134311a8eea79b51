"""Plans, and the search for them."""
