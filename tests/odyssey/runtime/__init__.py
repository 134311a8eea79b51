"""What a rank runs: groups, exchanges, units."""
