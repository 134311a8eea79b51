"""Commands, and what they say."""
