"""What a transition takes."""
