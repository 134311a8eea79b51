"""What happens inside a rank, without an agent."""
