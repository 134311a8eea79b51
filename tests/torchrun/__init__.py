"""What holds under torchrun holds under ours: both run each scene."""
