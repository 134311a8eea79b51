"""The log that agents agree on."""
