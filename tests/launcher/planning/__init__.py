"""What is measured, and what is planned ahead."""
