"""What a script's own loop runs: operations, backwards."""
