"""Jobs through one agent."""
